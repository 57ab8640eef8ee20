"""`burnish init`: a policy folder with fresh weights from a preset, its tokenizer beside it."""

import json
import logging
import tempfile
from pathlib import Path

from burnish.policy.checkpoint.lineage import LINEAGE_FILE, code_version
from burnish.policy.checkpoint.released import refuse_other_content, save_policy
from burnish.policy.config import ConfigError, InitRun, ModelConfig
from burnish.policy.encoding.subvocabulary import tiny_tokenizer
from burnish.policy.encoding.tokenizer import Tokenizer, load_tokenizer
from burnish.policy.model.transformer import Transformer
from burnish.policy.presets import TINY_VOCABULARY, preset

logger = logging.getLogger(__name__)
_MOST_PARAMETERS = 2_000_000_000


def main(config: InitRun) -> int:
    """Write the folder.

    Raises:
        ConfigError: an unknown preset, or one too large to be initialised in this machine's memory.
        ValueError: the folder exists and `overwrite` is off.
    """
    out = Path(config.out)
    if out.exists() and not config.overwrite:
        raise ValueError(f"out: {out} exists already; give another folder or overwrite=true")
    refuse_other_content(out)
    model_config = preset(config.preset)
    model_config.engram_layer_ids, model_config.engram_num_embeddings = [], []
    size = num_parameters(model_config)
    if size > _MOST_PARAMETERS:
        raise ConfigError(
            f"preset {config.preset} has {size / 1e9:.1f} B parameters; it is for planning and for released "
            f"checkpoints, fresh weights are made for mini, small and tiny"
        )
    tokenizer = tiny_tokenizer() if model_config.vocab_size == TINY_VOCABULARY else load_tokenizer()
    check_vocabulary(model_config, tokenizer)
    model = Transformer(model_config)
    model.reset_parameters(config.seed)
    with tempfile.TemporaryDirectory() as side:
        tokenizer.save(Path(side))
        lineage = {"preset": config.preset, "stage": "init", "seed": config.seed, "parents": {}, "code": code_version()}
        (Path(side) / LINEAGE_FILE).write_text(json.dumps(lineage, indent=1) + "\n")
        save_policy(model, out, side_files_from=side)
    logger.info("Policy %s: preset %s, %.2f M parameters, seed %d", out, config.preset, size / 1e6, config.seed)
    return 0


def num_parameters(config: ModelConfig) -> int:
    """Parameters of the text core, router biases included, without making a weight."""
    import torch

    with torch.device("meta"):
        return sum(tensor.numel() for tensor in Transformer(config).state_dict().values())


def check_vocabulary(config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError where the config's special ids are not the tokenizer's."""
    special = tokenizer.special
    pairs = {"bos_token_id": special.bos, "eos_token_id": special.eos, "pad_token_id": special.pad}
    pairs["image_token_id"] = special.image
    for key, want in pairs.items():
        if getattr(config, key) != want:
            raise ConfigError(f"model config: {key} must be {want} with this tokenizer, got {getattr(config, key)}")
