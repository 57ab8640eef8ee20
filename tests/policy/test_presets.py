"""The presets: their sizes, and that none of them leaves a mechanism of the architecture out."""

import pytest

from burnish.policy.config import ConfigError, LayerMode
from burnish.policy.initialize import num_parameters
from burnish.policy.presets import PRESETS, preset


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("tiny", 1.3e6, 1.7e6), ("small", 10e6, 25e6), ("mini", 0.2e9, 0.5e9), ("flash", 551.5e9, 551.6e9)],
)
def test_sizes(name, low, high):
    config = preset(name)
    config.engram_layer_ids, config.engram_num_embeddings = [], []  # counted apart from the backbone
    assert low <= num_parameters(config) <= high


@pytest.mark.parametrize("name", PRESETS)
def test_every_mechanism_is_there(name):
    config = preset(name)
    plans = config.layers()
    assert {plan.mode for plan in plans} == set(LayerMode)
    assert {plan.ratio for plan in plans} == {0, 1, 2}
    assert any(plan.pooled for plan in plans)
    assert config.hc_mult == 4
    assert config.num_experts_per_tok < config.n_routed_experts
    assert config.decoder_start == config.num_hidden_layers // 2
    # a context can outgrow window, selection and pool
    longest = config.max_position_embeddings
    assert config.sliding_window < config.index_topk < config.candidate_topk_blocks * config.candidate_block_size
    assert config.candidate_topk_blocks * config.candidate_block_size < longest
    assert config.rope_scaling.original_max_position_embeddings < longest
    # whole quantiser groups, as the caches store them
    assert config.head_dim % 32 == 0
    assert config.index_head_dim % 32 == 0


def test_presets_are_made_anew_and_unknown_ones_are_named():
    preset("tiny").kv_source_layer_ids.append(99)
    assert 99 not in preset("tiny").kv_source_layer_ids
    with pytest.raises(ConfigError, match="unknown model preset 'large'; there are flash, mini, small, tiny"):
        preset("large")
