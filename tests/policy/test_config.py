"""ModelConfig and config.json: the released values, every rule with its message, both ways without loss."""

import dataclasses
import json

import pytest

from burnish.policy.config import ConfigError, LayerMode, ModelConfig, RopeScaling
from burnish.policy.presets import PRESETS, preset
from burnish.policy.released_config import from_released, load_config, to_released

RELEASED = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "transformers_version": "5.6.0",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "vision_config": {"model_type": "deepseek_v41_vision"},
    "text_config": {
        "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120, "moe_intermediate_size": 2304,
        "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
        "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8, "hidden_act": "silu",
        "swiglu_limit": 10.0, "rms_norm_eps": 1e-20, "attention_bias": False, "attention_dropout": 0.0,
        "initializer_range": 0.02, "use_cache": True, "tie_word_embeddings": False, "max_position_embeddings": 1048576,
        "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
        "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                         "original_max_position_embeddings": 65536},
        "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "sliding_window": 128,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3, "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "index_n_heads": 32, "index_head_dim": 128,
        "index_topk": 512, "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682], "engram_max_ngram_size": 4, "engram_vocab_size": 16000000,
        "engram_n_heads": 8, "engram_head_dim": 256, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092,
        "num_nextn_predict_layers": 3, "dspark_block_size": 5, "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256, "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    },
}  # fmt: skip


def released(**text) -> dict:
    return {**RELEASED, "text_config": {**RELEASED["text_config"], **text}}


def test_defaults_are_the_released_values():
    assert from_released(RELEASED) == ModelConfig()
    names = {f.name for f in dataclasses.fields(ModelConfig)}
    assert names - set(RELEASED["text_config"]) == {
        "gate_temp", "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"
    }  # fmt: skip


def test_the_released_schedule():
    plans = ModelConfig().layers()
    modes = {mode: [plan.layer for plan in plans if plan.mode is mode] for mode in LayerMode}
    assert modes[LayerMode.window] == [0, 1]
    assert modes[LayerMode.full] == [2, 8, 14, 20]
    assert modes[LayerMode.reindex] == [24, 28, 32, 36]
    assert len(modes[LayerMode.reuse]) == 30
    assert [(p.kv_source, p.index_source, p.ratio, p.pooled) for p in (plans[7], plans[19], plans[20], plans[23])] == [
        (2, 2, 2, False), (14, 14, 2, False), (20, 20, 1, False), (20, 20, 1, False)
    ]  # fmt: skip
    assert [(p.kv_source, p.index_source, p.pooled) for p in (plans[24], plans[27], plans[39])] == [
        (20, 24, True), (20, 24, False), (20, 36, False)
    ]  # fmt: skip
    assert ModelConfig().decoder_start == 20


def test_cache_rows_and_bytes_of_the_released_geometry():
    config = ModelConfig()
    assert (config.main_row_bytes, config.index_row_bytes, config.window_row_bytes) == (288, 68, 528)
    assert config.global_bytes(8192) == 7290880
    for tokens in (2, 64, 1_000_000):
        assert config.global_bytes(tokens) == 890 * tokens
    assert config.global_bytes(3) == 890 * 2 + 356  # half a pair stores nothing
    assert config.global_bytes(0) == 0


def test_ids_that_stand_for_something_else():
    assert ModelConfig().placeholder_ids == [2, 128799, 129264]
    assert preset("tiny").placeholder_ids == [2, 1023]


@pytest.mark.parametrize("name", [*PRESETS, "core"])
def test_config_json_reads_back_equal(name, core_config, tmp_path):
    config = core_config if name == "core" else preset(name)
    raw = json.loads(json.dumps(to_released(config)))
    assert from_released(raw) == config
    assert to_released(from_released(raw)) == raw
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_config(tmp_path) == config
    assert load_config(tmp_path / "config.json") == config


def test_other_spellings_are_read():
    assert from_released(released(compress_ratios=[0, 0] + [2] * 18 + [1] * 20)) == ModelConfig()
    renamed = released(engram_pad_id=2)
    del renamed["text_config"]["engram_pad_token_id"]
    assert from_released(renamed) == ModelConfig()
    assert from_released(released(pad_token_id=None, bos_token_id=None)) == ModelConfig()
    assert from_released(RELEASED["text_config"]) == ModelConfig()  # no outer level
    assert from_released(released(gate_temp=2.0)).gate_temp == 2.0
    assert from_released(released(rope_scaling={"rope_type": "yarn", "factor": 4.0})).rope_scaling == RopeScaling(
        factor=4.0
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads must be 1, got 2"),
        ({"n_shared_experts": 0}, "n_shared_experts must be 1, got 0"),
        ({"o_groups": 7}, r"num_attention_heads must be a multiple of o_groups \(7\), got 64"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even and at most 128, got 63"),
        ({"qk_rope_head_dim": 130}, "qk_rope_head_dim must be even and at most 128, got 130"),
        ({"num_hidden_layers": 44, "compress_ratios": [1] * 45}, "no kv_source_layer_ids entry at or below it"),
        ({"compress_ratios": [-1] * 43}, "compress_ratios must be whole numbers, none negative"),
        ({"index_source_layer_ids": [2, 8, 20]}, r"kv_source_layer_ids must be a subset of index_source_layer_ids \[2, 8"),
        ({"kv_source_layer_ids": [8, 2, 14, 20]}, "kv_source_layer_ids must be strictly increasing layer ids"),
        ({"index_source_layer_ids": [2, 8, 14, 20, 20]}, "index_source_layer_ids must be strictly increasing layer ids"),
        ({"index_source_layer_ids": [2, 8, 14, 20, 40]}, r"layer ids below num_hidden_layers \(40\), got \[2, 8"),
        ({"index_source_layer_ids": [1, 2, 8, 14, 20]}, r"compress_ratios\[1\] is 0, but layer 1 is a source"),
        ({"kv_source_layer_ids": [8, 14, 20], "index_source_layer_ids": [8, 14, 20]},
         r"layer 2 has compression ratio 2, but no kv_source_layer_ids entry at or below it has that ratio"),
        ({"kv_source_layer_ids": [2, 8, 14], "index_source_layer_ids": [2, 8, 14], "candidate_source_layer_id": -1},
         r"layer 20 has compression ratio 1, but no"),
        ({"candidate_source_layer_id": 24}, r"candidate_source_layer_id must be -1 or one of kv_source_layer_ids"),
        ({"engram_layer_ids": [1]}, r"engram_num_embeddings must be one entry for each of engram_layer_ids \(1\), got 2"),
        ({"num_experts_per_tok": 385}, r"num_experts_per_tok must be at most n_routed_experts \(384\), got 385"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"hidden_size": "5120"}, "text_config.hidden_size must be a whole number, got '5120'"),
        ({"hidden_size": 5120.0}, "text_config.hidden_size must be a whole number, got 5120.0"),
        ({"hidden_size": True}, "text_config.hidden_size must be a whole number, got True"),
        ({"rope_theta": "1e4"}, "text_config.rope_theta must be a number, got '1e4'"),
        ({"norm_topk_prob": 1}, "text_config.norm_topk_prob must be true or false, got 1"),
        ({"compress_ratios": [0.5] * 43}, "text_config.compress_ratios must be a list of whole numbers"),
        ({"rope_scaling": {"type": "linear"}}, "text_config.rope_scaling.type must be 'yarn', got 'linear'"),
        ({"rope_scaling": {"type": "yarn", "base": 3}}, "text_config.rope_scaling.base is not a key"),
        ({"rope_scaling": None}, "text_config.rope_scaling must be an object, got None"),
        ({"scoring_func": "sigmoid"}, "text_config.scoring_func must be 'sqrtsoftplus' for this architecture, got 'sigmoid'"),
        ({"tie_word_embeddings": True}, "text_config.tie_word_embeddings must be False"),
        ({"n_group": 8}, "text_config.n_group is not a key of this architecture"),
    ],
)  # fmt: skip
def test_a_broken_rule_names_key_value_and_file(change, sentence, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(released(**change)))
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_what_is_no_config_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config.json at .*config.json: give the folder of a policy"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="expected an object of keys and values, got list"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1,\n}')
    with pytest.raises(ConfigError, match=r"not JSON \(line 2"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number above 0, got nan"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a finite number above 0, got -1.0"),
        ({"o_groups": 0}, "num_attention_heads must be a multiple of o_groups"),
        (
            {"rope_scaling": {"type": "yarn", "factor": "x"}},
            "text_config.rope_scaling.factor must be a number, got 'x'",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 0}},
            "text_config.rope_scaling.factor must be a finite number above 0",
        ),
    ],
)
def test_a_number_that_computes_nothing_is_named(change, sentence, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(released(**change)))
    with pytest.raises(ConfigError, match=sentence):
        load_config(tmp_path)
