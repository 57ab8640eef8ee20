"""A small model of every mechanism, short enough for hundreds of schedules: window 8, top-k 6, pool of 3 blocks of 4."""

from collections.abc import Callable

import pytest
import torch

from burnish.policy.config import ModelConfig
from burnish.policy.model.transformer import Transformer


@pytest.fixture(autouse=True)
def one_thread():
    """The suite's own speed on a shared machine; results do not depend on it (tested in test_exact_replay)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def small_config() -> ModelConfig:
    return ModelConfig(
        vocab_size=115, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=5, num_attention_heads=4,
        head_dim=32, qk_rope_head_dim=8, q_lora_rank=24, o_lora_rank=16, o_groups=2, n_routed_experts=8,
        num_experts_per_tok=2, sliding_window=8, compress_ratios=[0, 2, 1, 1, 1], kv_source_layer_ids=[1, 2],
        index_source_layer_ids=[1, 2, 3], index_n_heads=4, index_head_dim=32, index_topk=6,
        candidate_source_layer_id=2, candidate_topk_blocks=3, candidate_block_size=4, hc_sinkhorn_iters=3,
        engram_layer_ids=[], engram_num_embeddings=[], num_nextn_predict_layers=0, max_position_embeddings=4096,
        pad_token_id=2, image_token_id=4, eos_token_id=1, initializer_range=0.15,
    )  # fmt: skip


@pytest.fixture(scope="session")
def make_model(small_config: ModelConfig) -> Callable[..., Transformer]:
    """Random weights by seed, biases and sinks included."""

    def make(seed: int = 0, config: ModelConfig | None = None) -> Transformer:
        model = Transformer(config or small_config)
        model.reset_parameters(seed)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if name.endswith(("attn_sink", "_base", "gate.bias")):
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
        return model.requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., Transformer]) -> Transformer:
    """Weights that no test changes; tests that swap weights make their own."""
    return make_model(0)
