"""The deterministic products: bits of a row do not depend on the other rows."""

import pytest
import torch

from burnish.kernels.attention.reference import index_scores_ref, sink_attention_ref
from burnish.kernels.moe.reference import experts_ref
from burnish.kernels.tile.reference import grouped_linear, linear


@pytest.mark.parametrize(("size_in", "size_out"), [(64, 64), (128, 24), (33, 17), (512, 128), (128, 1000)])
def test_tiled_rows_are_equal_in_every_batch(size_in, size_out):
    torch.manual_seed(42)
    x, weight = torch.randn(101, size_in), torch.randn(size_out, size_in)
    whole = linear(x, weight, tiled=True)
    assert torch.allclose(whole, x @ weight.T, atol=1e-4)
    for start, stop in ((0, 1), (5, 8), (9, 40), (13, 101), (100, 101)):
        assert torch.equal(linear(x[start:stop], weight, tiled=True), whole[start:stop])


def test_attention_of_a_row_is_equal_in_every_batch():
    torch.manual_seed(42)
    q, keys, sink = torch.randn(48, 4, 32), torch.randn(48, 84, 32), torch.randn(4)
    valid = torch.rand(48, 84) > 0.3
    whole = sink_attention_ref(q, keys, valid, sink, 32**-0.5)
    for rows in (slice(0, 16), slice(16, 32), slice(1, 17)):
        assert torch.equal(sink_attention_ref(q[rows], keys[rows], valid[rows], sink, 32**-0.5), whole[rows])


def test_index_scores_do_not_depend_on_later_entries():
    torch.manual_seed(42)
    q, weights, keys = torch.randn(16, 4, 32), torch.randn(16, 4), torch.randn(2, 256, 32)
    context = torch.arange(16) % 2
    whole = index_scores_ref(q, weights, keys, context)
    assert torch.equal(index_scores_ref(q, weights, keys[:, :64].contiguous(), context), whole[:, :64])
    assert torch.equal(index_scores_ref(q[5:7], weights[5:7], keys, context[5:7]), whole[5:7])


def test_experts_of_a_row_are_equal_in_every_batch_and_match_a_loop():
    torch.manual_seed(42)
    num_rows, hidden, width, num, k = 40, 32, 16, 6, 2
    x, weights = torch.randn(num_rows, hidden), torch.rand(num_rows, k)
    experts = torch.stack([torch.randperm(num)[:k] for _ in range(num_rows)])
    experts[7] = -1
    w1, w3, w2 = torch.randn(num, width, hidden), torch.randn(num, width, hidden), torch.randn(num, hidden, width)
    whole = experts_ref(x, experts, weights, w1, w3, w2, 10.0)
    assert torch.equal(whole[7], torch.zeros(hidden))
    for row in (0, 3, 39):
        want = torch.zeros(hidden)
        for expert, weight in zip(experts[row].tolist(), weights[row], strict=True):
            gate, up = (w1[expert] @ x[row]).clamp_max(10), (w3[expert] @ x[row]).clamp(-10, 10)
            want += w2[expert] @ (torch.nn.functional.silu(gate) * up * weight)
        assert torch.allclose(whole[row], want, atol=1e-3)
    part = slice(3, 20)
    assert torch.equal(experts_ref(x[part], experts[part], weights[part], w1, w3, w2, 10.0), whole[part])


def test_large_expert_weights_take_the_loop_and_agree():
    torch.manual_seed(42)
    x, weight = torch.randn(5, 16, 300), torch.randn(3, 256, 300)
    owner = torch.tensor([0, 0, 2, 2, 2])
    want = torch.stack([x[t] @ weight[owner[t]].T for t in range(5)])
    assert torch.allclose(grouped_linear(x, weight, owner), want, atol=1e-3)
