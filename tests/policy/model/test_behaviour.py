"""The architecture's own rules: who is trained by whom, what shifts and what averages, published numbers."""

import dataclasses

import pytest
import torch

from burnish.kernels.attention.reference import sink_attention_ref
from burnish.policy.config import LayerMode, ModelConfig
from burnish.policy.model import attention as attention_module
from burnish.policy.model.block import Carry
from burnish.policy.model.compressor import Compressor
from burnish.policy.model.graph_store import GraphStore
from burnish.policy.model.indexer import Indexer
from burnish.policy.model.rope import inverse_frequencies, rotate, rotations
from burnish.policy.model.rows import build_rows, plain_rows
from burnish.policy.model.transformer import Transformer
from burnish.policy.presets import flash


def test_published_rope_frequencies_of_both_layer_kinds():
    config, pair = ModelConfig(), [0, 16, 20, 24, 28, 31]
    plain = inverse_frequencies(config, compressed=False)
    want = torch.tensor([1, 0.01, 3.16227766e-3, 1e-3, 3.16227766e-4, 1.333521432e-4])
    torch.testing.assert_close(plain[pair], want, rtol=1e-6, atol=0)
    scaled = inverse_frequencies(config, compressed=True)
    want = torch.tensor([1, 2.265625e-3, 2.969777783e-4, 1.953125e-5, 1.746928107e-6, 5.680529037e-7])
    torch.testing.assert_close(scaled[pair], want, rtol=1e-6, atol=0)
    want = torch.tensor([6.876560219e-01, 3.635538584e-03, 5.372312671e-06])
    torch.testing.assert_close(scaled[[1, 15, 25]], want, rtol=1e-6, atol=0)
    # position 127, pair 1: the angle tells the two bases apart
    assert float(127 * plain[1]) == pytest.approx(95.2366, abs=1e-3)
    assert float(127 * scaled[1]) == pytest.approx(87.3323, abs=1e-3)


def test_rotation_turns_adjacent_channels_of_the_tail_and_back():
    rotation = rotations(torch.tensor([3]), torch.tensor([0.5, 0.1]))
    x = torch.tensor([[9.0, 8, 1, 0, 0, 2]])
    turned = rotate(x, rotation)
    angle = torch.tensor([1.5, 0.3])
    want = torch.tensor([[9.0, 8, angle[0].cos(), angle[0].sin(), -2 * angle[1].sin(), 2 * angle[1].cos()]])
    torch.testing.assert_close(turned, want)
    torch.testing.assert_close(rotate(turned, rotation, inverse=True), x)


def test_compressor_weighs_each_pair_by_its_gates_and_drops_the_half_pair():
    """Public case A15 (iv): ratio 2, no overlap; 9 tokens make 4 entries."""
    config = ModelConfig(
        hidden_size=32, head_dim=32, index_head_dim=32, qk_rope_head_dim=8, num_hidden_layers=1, compress_ratios=[2],
        kv_source_layer_ids=[0], index_source_layer_ids=[0], candidate_source_layer_id=-1, sliding_window=4,
        engram_layer_ids=[], engram_num_embeddings=[], num_nextn_predict_layers=0, dspark_target_layer_ids=[],
    )  # fmt: skip
    compressor = Compressor(config, 0, None)
    values, gates = torch.arange(10.0, 19.0), torch.tensor([0, 1, 0, -1, 1, 0, 2, 0.5, 7.0])
    x = torch.zeros(9, 32)
    x[:, 0], x[:, 1] = values, gates
    with torch.no_grad():
        compressor.wkv.weight.zero_()[:, 0] = 1.0
        compressor.wgate.weight.zero_()[:, 1] = 1.0
    compressor.norm = torch.nn.Identity()
    latent, position = compressor(x, GraphStore(config, plain_rows([range(9)], pad=False)), False)
    want = torch.tensor([10.731058579, 12.268941421, 14.268941421, 16.182425524])
    torch.testing.assert_close(latent, want.unsqueeze(1).expand(-1, 32), rtol=1e-6, atol=0)
    assert position.tolist() == [0, 2, 4, 6]


def test_full_layers_own_compressors_and_index_sources_own_indexers():
    """Released geometry: 4 compressors (3 of them gated), 8 indexers (4 with keys), 30 Reuse layers."""
    config = flash()
    config.engram_layer_ids, config.engram_num_embeddings = [], []
    with torch.device("meta"):
        model = Transformer(config)
    compressors = [m for m in model.modules() if isinstance(m, Compressor)]
    indexers = [m for m in model.modules() if isinstance(m, Indexer)]
    assert [c.layer for c in compressors] == [2, 8, 14, 20]
    assert [hasattr(c, "wgate") for c in compressors] == [True, True, True, False]
    assert [i.plan.layer for i in indexers] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [i.plan.layer for i in indexers if hasattr(i, "wk")] == [2, 8, 14, 20]
    assert [i.plan.pooled for i in indexers] == [False] * 4 + [True] * 4
    modes = [plan.mode for plan in config.layers()]
    assert modes.count(LayerMode.window) == 2
    assert modes.count(LayerMode.reuse) == 30


def test_language_loss_trains_every_compressor_and_no_indexer(core):
    rows = plain_rows([torch.randint(5, 115, (60,)).tolist()])
    out = core(rows, GraphStore(core.config, rows))
    wanted = {name: p for name, p in core.named_parameters() if "indexer" not in name}
    index = {name: p for name, p in core.named_parameters() if "indexer" in name}
    assert len(index) == 10
    loss = torch.log_softmax(core.logits(out.hidden[:60]), -1)[:, 7].sum()
    grads = torch.autograd.grad(loss, [*wanted.values(), *index.values()], allow_unused=True)
    for name, grad in zip(wanted, grads, strict=False):
        assert grad is not None, name
        assert grad.isfinite().all(), name
        assert grad.abs().max() > 0, name
    assert all(grad is None for grad in grads[len(wanted) :])


def test_a_shared_cache_is_trained_by_the_layers_that_read_it(core):
    """Cut off at layer 2's own attention, its compressor still learns from layer 3, and layer 4's from layer 7."""
    ids = torch.randint(5, 115, (40,)).tolist()
    rows = plain_rows([ids])

    def grad_of(source: int, silenced: list[int]) -> torch.Tensor:
        """Gradient of the source's compressor with the output of some attention layers cut."""
        hooks = [
            core.layers[layer].attn.register_forward_hook(lambda m, a, out: (out[0].detach(), out[1]))
            for layer in silenced
        ]
        out = core(rows, GraphStore(core.config, rows))
        for hook in hooks:
            hook.remove()
        weight = core.layers[source].attn.compressor.wkv.weight
        return torch.autograd.grad(out.hidden[:40].sum(), weight, allow_unused=True)[0]

    assert grad_of(2, [2]).abs().max() > 0
    assert grad_of(4, [4, 5, 6]).abs().max() > 0
    assert grad_of(2, [2, 3]) is None
    assert grad_of(4, [4, 5, 6, 7]) is None


def test_window_layers_know_distances_only(core_config, make_core, monkeypatch):
    monkeypatch.setattr(attention_module, "fake_fp8", lambda x: x)
    config = dataclasses.replace(
        core_config, compress_ratios=[0] * 8, kv_source_layer_ids=[], index_source_layer_ids=[],
        candidate_source_layer_id=-1,
    )  # fmt: skip
    model = make_core(0, config)
    ids = torch.randint(5, 115, (30,)).tolist()
    hidden = []
    for shift in (0, 501):
        rows = build_rows(
            ids, range(shift, shift + 30), [0] * 30, encoder_floor=[shift] * 30, decoder_floor=[shift] * 30
        )
        with torch.no_grad():
            hidden.append(model(rows, GraphStore(config, rows)).hidden[:30])
    torch.testing.assert_close(hidden[0], hidden[1], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(hidden[0][1:], hidden[0][:-1], atol=0.1)


def test_sink_takes_what_no_key_takes():
    q, keys = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    valid = torch.tensor([[False] * 5, [True, False, False, False, False]])
    out = sink_attention_ref(q, keys, valid, torch.zeros(3), 0.5)
    assert torch.equal(out[0], torch.zeros(3, 8))
    share = torch.sigmoid(0.5 * q[1] @ keys[1, 0])  # one key against a sink of logit 0
    torch.testing.assert_close(out[1], share.unsqueeze(1) * keys[1, 0])


def test_a_block_without_mixing_weights_adds_to_the_average_of_the_streams(core_config, make_core):
    """fn = 0: pre = 1/2 + eps, post = 1, comb = 1/4; the first collapse is stream 0."""
    model = make_core(3)
    block = model.layers[0]
    with torch.no_grad():
        for site in ("attn", "ffn"):
            getattr(block, f"hc_{site}_fn").zero_()
            getattr(block, f"hc_{site}_base").zero_()
    rows = plain_rows([torch.randint(5, 115, (16,)).tolist()])
    streams = torch.randn(16, 4, 64)
    first = torch.zeros(16, 4)
    first[:, 0] = 1.0
    with torch.no_grad():
        carry, _ = block(Carry(streams=streams, pre=first), rows, GraphStore(core_config, rows), None, False)
        y, _ = block.attn(block.attn_norm(streams[:, 0]), rows, GraphStore(core_config, rows), None, False)
        middle = streams.mean(1) + y
        y, _ = block.ffn(block.ffn_norm(4 * (0.5 + 1e-6) * middle), rows.live, None, False)
    torch.testing.assert_close(carry.streams, (middle + y).unsqueeze(1).expand(-1, 4, -1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(carry.pre, torch.full((16, 4), 0.5 + 1e-6))


def test_forced_experts_replace_the_routers_choice_but_not_its_scores(core):
    ids = torch.randint(5, 115, (16,)).tolist()
    rows = plain_rows([ids])

    def go(forced=None):
        with torch.no_grad():
            return core(rows, GraphStore(core.config, rows), deterministic=True, forced_experts=forced)

    free = go()
    assert torch.equal(go(free.experts).hidden, free.hidden)
    absent = [torch.full_like(chosen, -1) for chosen in free.experts]
    assert torch.equal(go(absent).hidden, free.hidden)
    other = [torch.full_like(chosen, -1) for chosen in free.experts]
    other[2][9] = (free.experts[2][9] + 1) % 8
    moved = go(other)
    assert torch.equal(moved.experts[2][9], other[2][9])
    assert torch.equal(moved.hidden[:9], free.hidden[:9])
    assert not torch.equal(moved.hidden[9], free.hidden[9])
    weight = core.layers[2].ffn.gate.weight
    forward = core(rows, GraphStore(core.config, rows), forced_experts=other)
    assert torch.autograd.grad(forward.hidden[9].sum(), weight)[0].abs().max() > 0


def test_padding_rows_reach_nothing(core):
    rows = plain_rows([torch.randint(5, 115, (5,)).tolist()])
    out = core(rows, GraphStore(core.config, rows), deterministic=True)
    assert all((chosen[5:] == -1).all() for chosen in out.experts)
    grad = torch.autograd.grad(out.hidden[:5].sum(), core.embed.weight)[0]
    assert torch.equal(grad[0], torch.zeros(64))  # the id that padding rows carry


def test_two_initialisations_of_one_seed_are_equal(core_config):
    first, second, other = (Transformer(core_config) for _ in range(3))
    first.reset_parameters(5)
    torch.rand(3)
    second.reset_parameters(5)
    other.reset_parameters(6)
    again = second.state_dict()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again[name]), name
        assert tensor.isfinite().all(), name
    assert not torch.equal(first.head.weight, other.head.weight)
