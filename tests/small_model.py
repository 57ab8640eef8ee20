"""The config of a model that has every mechanism and acts within 40 tokens: window 8, top-k 6, pool of 3 blocks of 4."""

from burnish.policy.config import ModelConfig


def small_config() -> ModelConfig:
    """A window layer, Full of ratio 2; Full with the pool, Reindex, Reuse of ratio 1."""
    return ModelConfig(
        vocab_size=115, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=5, num_attention_heads=4,
        head_dim=32, qk_rope_head_dim=8, q_lora_rank=24, o_lora_rank=16, o_groups=2, n_routed_experts=8,
        num_experts_per_tok=2, sliding_window=8, compress_ratios=[0, 2, 1, 1, 1], kv_source_layer_ids=[1, 2],
        index_source_layer_ids=[1, 2, 3], index_n_heads=4, index_head_dim=32, index_topk=6,
        candidate_source_layer_id=2, candidate_topk_blocks=3, candidate_block_size=4, hc_sinkhorn_iters=3,
        engram_layer_ids=[], engram_num_embeddings=[], num_nextn_predict_layers=0, dspark_target_layer_ids=[],
        max_position_embeddings=4096, pad_token_id=2, image_token_id=4, eos_token_id=1, initializer_range=0.15,
    )  # fmt: skip
