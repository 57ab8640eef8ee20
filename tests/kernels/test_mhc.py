"""Hyper-connection coefficients: published numbers, ranges, gradient of the written-out Sinkhorn."""

import torch

from burnish.kernels.mhc.reference import coefficients_ref, collapse_ref, expand_ref, sinkhorn_ref


def test_sinkhorn_gives_the_published_matrix():
    logits = torch.tensor([[2.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, -1, 0], [0.5, 0, 0, 0]])
    want = torch.tensor(
        [
            [0.5293597, 0.1136746, 0.2023458, 0.1546190],
            [0.0971274, 0.4189210, 0.2743279, 0.2096228],
            [0.1728910, 0.2743279, 0.1796423, 0.3731378],
            [0.2006210, 0.1930756, 0.3436831, 0.2626194],
        ]
    )
    assert torch.allclose(sinkhorn_ref(logits[None], 20, 1e-6)[0], want, atol=1e-6)


def test_sinkhorn_order_and_safe_exponent():
    logits = torch.tensor([[1, 0, -1], [0, 2, 0.5], [0.5, -0.5, 1.5]])
    once = torch.tensor(
        [
            [0.658918268, 0.228529523, 0.097910728],
            [0.098677631, 0.687397640, 0.178627272],
            [0.242403110, 0.084071904, 0.723460913],
        ]
    )
    assert torch.allclose(sinkhorn_ref(logits[None], 1, 1e-6)[0], once, atol=1e-6)
    many = torch.tensor(
        [
            [0.671142094, 0.224877927, 0.103978979],
            [0.103978919, 0.699771426, 0.196248655],
            [0.224877987, 0.075349647, 0.699771366],
        ]
    )
    assert torch.allclose(sinkhorn_ref(logits[None], 20, 1e-6)[0], many, atol=1e-6)
    large = sinkhorn_ref(120 * torch.eye(3)[None], 20, 1e-6)[0]
    assert torch.allclose(large, torch.eye(3) * 0.999997 + (1 - torch.eye(3)) * 1e-6, atol=1e-6)


def test_sinkhorn_gradient_matches_autograd_of_the_plain_loop():
    torch.manual_seed(42)
    logits, dy = torch.randn(7, 4, 4), torch.randn(7, 4, 4)

    def plain(x):
        mix = x.softmax(-1) + 1e-6
        mix = mix / (mix.sum(-2, keepdim=True) + 1e-6)
        for _ in range(19):
            mix = mix / (mix.sum(-1, keepdim=True) + 1e-6)
            mix = mix / (mix.sum(-2, keepdim=True) + 1e-6)
        return mix

    grads = []
    for fn in (plain, lambda x: sinkhorn_ref(x, 20, 1e-6)):
        leaf = logits.clone().requires_grad_()
        fn(leaf).backward(dy)
        grads.append(leaf.grad)
    assert torch.allclose(*grads, atol=1e-6)


def test_coefficient_ranges():
    base = torch.tensor([0.0, 1, -2] + [0.0, 1, -2] + [0.0] * 9)
    pre, post, comb = coefficients_ref(
        torch.zeros(1, 3, 8), torch.zeros(15, 24), base, torch.ones(3), norm_eps=1e-20, eps=1e-6, iters=20, tiled=False
    )
    assert torch.allclose(pre[0], torch.tensor([0.500001, 0.731059579, 0.119203922]), atol=1e-6)
    assert torch.allclose(post[0], torch.tensor([1, 1.462117157, 0.238405844]), atol=1e-6)
    assert torch.allclose(comb.sum(-1), torch.ones(1, 3), atol=1e-5)


def test_expand_sums_over_the_input_stream():
    streams = torch.randn(2, 3, 8)
    comb, post, y = torch.rand(2, 3, 3), torch.rand(2, 3), torch.randn(2, 8)
    want = post[..., None] * y[:, None] + torch.einsum("rjk,rjd->rkd", comb, streams)
    assert torch.allclose(expand_ref(y, streams, post, comb), want, atol=1e-6)
    assert torch.allclose(collapse_ref(streams, post), torch.einsum("rs,rsd->rd", post, streams), atol=1e-6)
