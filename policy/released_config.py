"""The released config.json <-> ModelConfig: every key known, typed and checked. Torch-free."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from burnish.policy.checkpoint.json_file import JsonFileError, read_object
from burnish.policy.config import ConfigError, ModelConfig, RopeScaling

# read, checked and otherwise without effect on this model: constants of the architecture or of the framework
_FIXED = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "model_type": "deepseek_v41_text",
}
_FRAMEWORK = {
    "architectures", "output_hidden_states", "output_attentions", "return_dict", "dtype", "torch_dtype", "use_cache",
    "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type", "_name_or_path",
    "transformers_version", "router_aux_loss_coef", "text_config", "vision_config", "quantization_config",
    "model_type", "image_token_id", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
}  # fmt: skip


def load_config(path: Path | str) -> ModelConfig:
    """Read a released config.json (or a policy folder that holds one).

    Raises:
        ConfigError: not JSON, an unknown key, a constant of the architecture with another value, a failed rule.
        FileNotFoundError: no such file.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no config.json at {path}: give the folder of a policy")
    try:
        raw = read_object(path)
    except JsonFileError as error:
        raise ConfigError(str(error)) from None
    try:
        return from_released(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def from_released(raw: dict[str, Any]) -> ModelConfig:
    """Build a ModelConfig from the content of a released config.json.

    Args:
        raw: the top level; its `text_config` holds the text tower. `engram_pad_id` is accepted for
            `engram_pad_token_id`; draft ratios missing from `compress_ratios` are zeros.

    Raises:
        ConfigError: see `load_config`.
    """
    text = raw.get("text_config", raw) if isinstance(raw, dict) else raw
    if not isinstance(text, dict):
        raise ConfigError(f"expected an object of keys and values, got {type(text).__name__}")
    text = dict(text)
    known = {f.name: f.type for f in fields(ModelConfig)}
    if "engram_pad_id" in text:
        text["engram_pad_token_id"] = text.pop("engram_pad_id")
    for key, value in _FIXED.items():
        if key in text and text[key] != value:
            raise ConfigError(f"text_config.{key} must be {value!r} for this architecture, got {text[key]!r}")
    values: dict[str, Any] = {}
    for key, value in text.items():
        if key == "rope_scaling":
            values[key] = _rope_scaling(value)
        elif key in known:
            values[key] = _checked(key, value, known[key])
        elif key not in _FRAMEWORK and key not in _FIXED:
            raise ConfigError(f"text_config.{key} is not a key of this architecture")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        top = raw.get(key)
        if values.get(key) is None and top is not None:
            values[key] = _checked(key, top, int, "")
    values = {key: value for key, value in values.items() if value is not None}
    depth = values.get("num_hidden_layers", 40) + values.get("num_nextn_predict_layers", 3)
    if "compress_ratios" in values:
        values["compress_ratios"] = values["compress_ratios"] + [0] * (depth - len(values["compress_ratios"]))
    return ModelConfig(**values)


def _checked(key: str, value: Any, kind: Any, prefix: str = "text_config.") -> Any:
    """The value of a key if it is of the field's type; None stands for an absent key."""
    kinds = {bool: (bool, "true or false"), int: (int, "a whole number"), float: (int | float, "a number")}
    if kind in kinds:
        expected, words = kinds[kind]
        fits = value is None or (isinstance(value, expected) and isinstance(value, bool) == (kind is bool))
    else:
        words = "a list of whole numbers"
        fits = isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    if not fits:
        raise ConfigError(f"{prefix}{key} must be {words}, got {value!r}")
    return value


def _rope_scaling(raw: dict[str, Any]) -> RopeScaling:
    if not isinstance(raw, dict):
        raise ConfigError(f"text_config.rope_scaling must be an object, got {raw!r}")
    kind = raw.get("type", raw.get("rope_type", "yarn"))
    if kind != "yarn":
        raise ConfigError(f"text_config.rope_scaling.type must be 'yarn', got {kind!r}")
    known = {f.name: f.type for f in fields(RopeScaling)}
    unknown = set(raw) - set(known) - {"type", "rope_type", "mscale", "mscale_all_dim", "attention_factor"}
    if unknown:
        raise ConfigError(f"text_config.rope_scaling.{sorted(unknown)[0]} is not a key of this architecture")
    values = {
        key: _checked(key, value, known[key], "text_config.rope_scaling.") for key, value in raw.items() if key in known
    }
    if wrong := [key for key, value in values.items() if not (isinstance(value, int | float) and 0 < value < math.inf)]:
        raise ConfigError(
            f"text_config.rope_scaling.{wrong[0]} must be a finite number above 0, got {values[wrong[0]]!r}"
        )
    return RopeScaling(**values)


def to_released(config: ModelConfig) -> dict[str, Any]:
    """The released config.json's content for `config`; `from_released` reads it back equal."""
    text: dict[str, Any] = {}
    for f in fields(ModelConfig):
        value = getattr(config, f.name)
        if f.name == "rope_scaling":
            value = {"type": "yarn", **{g.name: getattr(value, g.name) for g in fields(RopeScaling)}}
        text[f.name] = value
    text.update(_FIXED)
    ids = {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")}
    del text["image_token_id"]
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        **ids,
        "text_config": text,
    }
