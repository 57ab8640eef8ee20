"""Routing: published numbers; the bias steers the choice only."""

import torch

from burnish.kernels.moe.reference import route_ref, swiglu_ref


def test_v41_routing_numbers():
    logits = torch.tensor([[2, 1, 0.5, -1, -3, 3, 0, -2]])
    bias = torch.tensor([0, 0, 0.4, 1.2, 0, -1, 0, 0]).requires_grad_()
    experts, weights = route_ref(logits, bias, 3, renormalize=True, scaling=1.5)
    got = dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))
    assert set(got) == {3, 0, 2}
    for expert, want in {3: 0.279378606, 0: 0.727974052, 2: 0.492647343}.items():
        assert abs(got[expert] - want) < 1e-6
    assert not weights.requires_grad


def test_image_tokens_choose_by_their_own_bias_and_weigh_without_it():
    logits = torch.tensor([[0.2, 1.5, 0.0, 0.4]])
    bias = torch.tensor([[0, -1, 0.8, 0]])
    experts, weights = route_ref(logits, bias, 2, renormalize=True, scaling=1.5)
    got = dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))
    assert set(got) == {2, 3}
    assert abs(got[2] - 0.698423368) < 1e-6
    assert abs(got[3] - 0.801576632) < 1e-6


def test_gate_is_clamped_above_only_and_up_on_both_sides():
    gate, up = torch.tensor([50.0, -50.0]), torch.tensor([-50.0, 50.0])
    got = swiglu_ref(gate, up, 10.0)
    silu = torch.nn.functional.silu
    assert torch.allclose(got, torch.stack((silu(torch.tensor(10.0)) * -10, silu(torch.tensor(-50.0)) * 10)))
