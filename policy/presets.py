"""The presets flash, mini, small and tiny: every mechanism of the architecture at four sizes. Torch-free."""

from burnish.policy.config import ConfigError, ModelConfig, RopeScaling

TINY_VOCABULARY = 1024
"""Rows of the tiny preset's embedding: its sub-vocabulary (policy/encoding) and room for the rest of the block."""


def flash() -> ModelConfig:
    """The released geometry, 552 B backbone: for planning, checkpoints and tests of shapes."""
    return ModelConfig()


def mini() -> ModelConfig:
    """About 0.3 B parameters on the full vocabulary: one GPU."""
    return ModelConfig(
        hidden_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=16,
        num_attention_heads=8,
        head_dim=256,
        qk_rope_head_dim=64,
        q_lora_rank=256,
        o_lora_rank=128,
        o_groups=4,
        max_position_embeddings=65536,
        rope_scaling=RopeScaling(original_max_position_embeddings=4096),
        n_routed_experts=24,
        num_experts_per_tok=4,
        compress_ratios=[0, 0] + [2] * 6 + [1] * 8,
        kv_source_layer_ids=[2, 5, 8],
        index_source_layer_ids=[2, 5, 8, 11, 14],
        index_n_heads=8,
        index_head_dim=64,
        index_topk=256,
        candidate_source_layer_id=8,
        candidate_topk_blocks=256,
        **_text_core(),
    )


def small() -> ModelConfig:
    """At most 25 M parameters on the tiny vocabulary: trains on one GPU in minutes."""
    return ModelConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=12,
        num_attention_heads=8,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=128,
        o_lora_rank=64,
        o_groups=4,
        max_position_embeddings=8192,
        rope_scaling=RopeScaling(original_max_position_embeddings=1024),
        n_routed_experts=12,
        num_experts_per_tok=3,
        sliding_window=64,
        compress_ratios=[0, 0] + [2] * 4 + [1] * 6,
        kv_source_layer_ids=[2, 4, 6],
        index_source_layer_ids=[2, 4, 6, 8, 10],
        index_n_heads=4,
        index_head_dim=32,
        index_topk=96,
        candidate_source_layer_id=6,
        candidate_topk_blocks=64,
        **_text_core(image_token_id=TINY_VOCABULARY - 1),
    )


def tiny() -> ModelConfig:
    """About 1.5 M parameters on the tiny vocabulary: CPU and CI."""
    return ModelConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=48,
        o_lora_rank=32,
        o_groups=2,
        max_position_embeddings=4096,
        rope_scaling=RopeScaling(original_max_position_embeddings=512),
        n_routed_experts=8,
        num_experts_per_tok=2,
        sliding_window=32,
        compress_ratios=[0, 2, 2, 1, 1, 1],
        kv_source_layer_ids=[1, 3],
        index_source_layer_ids=[1, 3, 5],
        index_n_heads=4,
        index_head_dim=32,
        index_topk=96,
        candidate_source_layer_id=3,
        candidate_topk_blocks=24,
        candidate_block_size=8,
        hc_sinkhorn_iters=8,
        initializer_range=0.06,
        **_text_core(image_token_id=TINY_VOCABULARY - 1),
    )


def _text_core(image_token_id: int = 129264) -> dict:
    """No n-gram memory and no draft layers: the parts this text core does not run."""
    return {
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
        "image_token_id": image_token_id,
    }


PRESETS = {"flash": flash, "mini": mini, "small": small, "tiny": tiny}


def preset(name: str) -> ModelConfig:
    """The config of one preset.

    Raises:
        ConfigError: no such preset.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown model preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]()
