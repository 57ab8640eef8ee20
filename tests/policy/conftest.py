"""A model of every mechanism at a size where all of them act within 40 tokens: window 8, top-k 6, pool of 3 blocks of 4.
The tiny tokenizer, and ids from a spelled-out conversation: special tokens where their spelling stands, text elsewhere.
"""

import re
from collections.abc import Callable

import pytest
import torch

from burnish.policy.config import ModelConfig
from burnish.policy.encoding.subvocabulary import tiny_tokenizer
from burnish.policy.encoding.tokenizer import Tokenizer
from burnish.policy.model.transformer import Transformer


@pytest.fixture(scope="session")
def core_config() -> ModelConfig:
    """Two window layers, Full and Reuse of ratio 2; Full with the pool, Reuse, Reindex, Reuse of ratio 1 (decoder half)."""
    return ModelConfig(
        vocab_size=115, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=8, num_attention_heads=4,
        head_dim=32, qk_rope_head_dim=8, q_lora_rank=24, o_lora_rank=16, o_groups=2, n_routed_experts=8,
        num_experts_per_tok=2, sliding_window=8, compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1], kv_source_layer_ids=[2, 4],
        index_source_layer_ids=[2, 4, 6], index_n_heads=4, index_head_dim=32, index_topk=6,
        candidate_source_layer_id=4, candidate_topk_blocks=3, candidate_block_size=4, hc_sinkhorn_iters=3,
        engram_layer_ids=[], engram_num_embeddings=[], num_nextn_predict_layers=0, dspark_target_layer_ids=[],
        max_position_embeddings=4096, image_token_id=4, initializer_range=0.15,
    )  # fmt: skip


@pytest.fixture(scope="session")
def make_core(core_config: ModelConfig) -> Callable[..., Transformer]:
    """Random weights by seed; biases, sinks and mHC bases are random too, so that none of them is idle."""

    def make(seed: int = 0, config: ModelConfig | None = None) -> Transformer:
        model = Transformer(config or core_config)
        model.reset_parameters(seed)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if name.endswith(("attn_sink", "_base", "gate.bias")):
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
        return model

    return make


@pytest.fixture(scope="session")
def core(make_core: Callable[..., Transformer]) -> Transformer:
    """Weights that no test changes."""
    return make_core(0)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture
def spell(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Text with special spellings to ids; what an independent encoder would send."""
    pattern = re.compile("(" + "|".join(sorted(map(re.escape, tokenizer.added), key=len, reverse=True)) + ")")

    def ids(text: str) -> list[int]:
        out: list[int] = []
        for piece in pattern.split(text):
            out += [tokenizer.added[piece]] if piece in tokenizer.added else tokenizer.encode(piece)
        return out

    return ids
