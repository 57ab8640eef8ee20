"""Sink attention against plain softmax with gradients; two-level selection; tie rule."""

import torch

from burnish.kernels.attention.reference import candidate_blocks_ref, select_top_ref, sink_attention_ref


def plain_attention(q, keys, valid, sink, scale):
    logits = torch.einsum("rhc,rkc->rhk", q, keys) * scale
    logits = logits.masked_fill(~valid[:, None], float("-inf"))
    column = sink.view(1, -1, 1).expand(q.shape[0], -1, 1)
    probs = torch.cat((logits, column), -1).softmax(-1)[..., :-1]
    return torch.einsum("rhk,rkc->rhc", probs, keys)


def test_sink_attention_matches_plain_softmax_in_value_and_gradient():
    torch.manual_seed(42)
    leaves = [torch.randn(5, 3, 16, dtype=torch.float64), torch.randn(5, 9, 16, dtype=torch.float64)]
    sink, valid = torch.randn(3), torch.rand(5, 9) > 0.4
    valid[2] = False
    dy = torch.randn(5, 3, 16, dtype=torch.float64)

    def run(fn):
        inputs = [leaf.float().clone().requires_grad_() for leaf in (*leaves, sink)]
        y = fn(inputs[0], inputs[1], valid, inputs[2], 0.25)
        return y, *torch.autograd.grad(y, inputs, dy.float())

    for got, want in zip(run(sink_attention_ref), run(plain_attention), strict=True):
        assert torch.allclose(got, want, atol=1e-5)


def test_a_row_without_keys_gives_zeros_not_nan():
    out = sink_attention_ref(
        torch.ones(1, 2, 4), torch.ones(1, 3, 4), torch.zeros(1, 3, dtype=torch.bool), torch.zeros(2), 1
    )
    assert torch.equal(out, torch.zeros(1, 2, 4))


SOURCE = torch.tensor([[0.2, 0.9, 0.1, 0.3, 0.8, 0.7, 0.6, 0.5, 0.4, 0.45, 0.35, 0.1, 0.05, 0.02, 9, 9]])
CONSUMER = torch.tensor([[0.9, 0.1, 0.2, 0.3, 5, 5, 5, 5, 4, 4, 4, 4, 0.6, 0.7, 9, 9]])


def test_pool_masks_the_future_before_the_block_maximum_and_pins_the_newest_block():
    visible = torch.tensor([14])
    kept = candidate_blocks_ref(SOURCE, visible, block=4, keep=2)
    assert kept[0].tolist() == [True, False, False, True]
    reachable = torch.arange(16) < 14
    allowed = kept.repeat_interleave(4, 1) & reachable
    assert select_top_ref(CONSUMER, allowed, 4)[0].tolist() == [0, 3, 12, 13]
    assert select_top_ref(SOURCE, reachable[None], 4)[0].tolist() == [1, 4, 5, 6]


def test_too_few_reachable_entries_are_padded_never_repeated():
    picked = select_top_ref(CONSUMER, torch.arange(16)[None] < 2, 4)
    assert picked[0].tolist() == [0, 1, -1, -1]


def test_no_visible_entry_pins_no_block():
    kept = candidate_blocks_ref(SOURCE, torch.tensor([0]), block=4, keep=2)
    assert not kept.any()


def test_equal_scores_go_to_the_lower_index():
    scores = torch.tensor([[0.0, -0.0, 1.0, 0.0, 1.0, 0.0]])
    assert select_top_ref(scores, torch.ones(1, 6, dtype=torch.bool), 4)[0].tolist() == [0, 1, 2, 4]
