"""The single terms of losses, with golden numbers: weights, clips, gates, the KL estimate, exponents at their limits."""

from dataclasses import replace

import pytest
import torch
from loss_inputs import F64, inputs, normaliser, values

from burnish.envs.errors import UserError
from burnish.rollout.loss_terms import (
    Corrections,
    LossInputs,
    Normaliser,
    Reduction,
    RolloutStatistics,
    importance_weight,
    safe_exp,
    unbiased_kl,
)
from burnish.rollout.losses import LOSSES, load_loss


def test_weights_of_stale_tokens():
    log_c = values(0.4, 0.9, 2.5).log()
    tis = importance_weight(log_c, Corrections(tis_cap=2.0))
    torch.testing.assert_close(tis, values(0.4, 0.9, 2.0))
    icepop = importance_weight(log_c, Corrections(icepop_low=0.5, icepop_high=2.0))
    torch.testing.assert_close(icepop, values(0, 0.9, 0))
    # c itself would overflow
    huge = importance_weight(torch.tensor([500.0]), Corrections(tis_cap=2.0))
    torch.testing.assert_close(huge, torch.tensor([2.0]))


def test_the_share_above_the_cap_is_of_raw_weights():
    tokens = inputs(values(5.0, 1.0).log(), behaviour=[0.0, 0.0], proximal_logprobs=values(5.0, 1.0).log())
    metrics = load_loss("clipped", {"tis_cap": 2.0})(tokens, normaliser(2)).metrics
    total, weight = metrics["train/importance_cut_share"]
    assert float(total) / weight == 0.5


def test_dual_clip_bounds_negative_advantages():
    tokens = inputs(values(0.5, 2.0, 10.0).log(), behaviour=[0.0] * 3, advantages=[-1.0] * 3)
    bare = load_loss("clipped")(tokens, normaliser(3)).loss
    dual = load_loss("clipped", {"dual_clip": 3.0})(tokens, normaliser(3)).loss
    assert bare.item() == pytest.approx(0.8 + 2 + 10)
    assert dual.item() == pytest.approx(0.8 + 2 + 3)
    with pytest.raises(UserError, match="dual_clip must be above 1"):
        load_loss("clipped", {"dual_clip": 0.5})(tokens, normaliser(3))


def test_decoupled_and_bypass():
    # rho 1.5 with c 0.5: decoupled clips rho = 1.5 at 1.2 and weighs by c; bypass sees the product 0.75, not clipped
    tokens = inputs(values(0.75).log(), behaviour=[0.0], proximal_logprobs=values(0.5).log())
    decoupled = load_loss("clipped", {"tis_cap": 2.0})(tokens, normaliser(1)).loss
    bypass = load_loss("clipped", {"clip_low": 0.3})(replace(tokens, proximal_logprobs=None), normaliser(1)).loss
    assert decoupled.item() == pytest.approx(-1.2 * 0.5)
    assert bypass.item() == pytest.approx(-0.75)


def test_dapo_clips_higher_upwards():
    tokens = inputs(values(1.25, 1.25).log(), behaviour=[0.0, 0.0])
    assert load_loss("clipped")(tokens, normaliser(2)).loss.item() == pytest.approx(-2.4)
    assert load_loss("dapo")(tokens, normaliser(2)).loss.item() == pytest.approx(-2.5)


def test_gspo_takes_the_ratio_of_the_rollout():
    tokens = inputs([0.2 - 1, -0.3 - 1, 0.0 - 1], behaviour=[-1.0, -1.0, -1.0])
    n = normaliser(3, reduction=Reduction.rollout_mean)
    loss = load_loss("gspo", {"clip_low": 0.2, "clip_high": 0.2})(tokens, n)
    assert -loss.loss.item() == pytest.approx(0.9672, abs=5e-5)
    (grad,) = torch.autograd.grad(loss.loss, tokens.logprobs)
    torch.testing.assert_close(grad, torch.full((3,), -float(torch.exp(values(-0.1 / 3))) / 3, dtype=F64))
    clipped = load_loss("gspo")(tokens, n)  # 0.9672 < 1 - 3e-4, advantage positive: not clipped; negative: clipped
    torch.testing.assert_close(clipped.loss, loss.loss)
    negative = load_loss("gspo")(replace(tokens, advantages=-tokens.advantages), n)
    assert negative.loss.item() == pytest.approx(1 - 3e-4)
    (grad,) = torch.autograd.grad(negative.loss, tokens.logprobs)
    assert (grad == 0).all()


@pytest.mark.parametrize("slot", [(-9.0, 5.0), (0.0, 0.0), (float("nan"), float("inf")), (1e9, -700.0)])
def test_a_sequence_level_loss_does_not_see_padding(slot):
    advantage, log_ratio = slot
    tokens = inputs(
        [0.1, -0.2, 0.4, log_ratio],
        behaviour=[0.0] * 4,
        advantages=[0.6, 0.6, 0.6, advantage],
        mask=[True, True, True, False],
    )
    loss = load_loss("gspo", {"clip_low": 0.2, "clip_high": 0.2})(
        tokens, normaliser(3, reduction=Reduction.rollout_mean)
    )
    assert loss.loss.item() == pytest.approx(-0.663102551, rel=1e-8)
    (grad,) = torch.autograd.grad(loss.loss, tokens.logprobs)
    assert grad[3].item() == 0
    assert (grad[:3] != 0).all()


@pytest.mark.parametrize("options", [{"name": "gspo"}, {"name": "clipped", "sequence_mask_delta": 1.0}])
def test_a_cut_rollout_without_statistics_is_refused(options):
    name = options.pop("name")
    loss = load_loss(name, dict(options))
    n = normaliser(4)
    with pytest.raises(ValueError, match="rollout 0 has 4 trained tokens, this micro-batch holds 2"):
        loss(inputs([-1.0, -1.0]), n)
    options["name"] = name
    assert loss(inputs([-1.0] * 4), n).loss.isfinite()


def test_cispo_keeps_every_gradient():
    tokens = inputs(values(3.0, 0.1).log(), behaviour=[0.0, 0.0], advantages=[1.0, -2.0])
    loss = load_loss("cispo")(tokens, normaliser(2)).loss
    (grad,) = torch.autograd.grad(loss, tokens.logprobs)
    torch.testing.assert_close(grad, values(-1.2, 0.2))


def test_dppo_masks_by_difference_of_probabilities():
    # p - mu: 0.3 up with A > 0 (masked), 0.0009 up with ratio 10 (kept), 0.3 down with A < 0 (masked), 0.3 down with A > 0
    p, mu = values(0.8, 0.001, 0.2, 0.2), values(0.5, 0.0001, 0.5, 0.5)
    tokens = inputs(p.log(), behaviour=mu.log(), advantages=[1.0, 1.0, -1.0, 1.0])
    loss = load_loss("dppo_tv", {"tau": 0.0})(tokens, normaliser(4))
    assert loss.loss.item() == pytest.approx(-10 - 0.4)
    assert float(loss.metrics["train/clipped_share"][0]) == 2
    with_tau = load_loss("dppo_tv")(tokens, normaliser(4)).loss
    assert (with_tau - loss.loss).item() == pytest.approx(1e-3 * float((p / mu).log().square().sum()))


@pytest.mark.parametrize(("advantage", "gate"), [(-1.0, 0.0), (1.0, 1.0)])
def test_off_policy_sequence_mask_removes_only_negatives(advantage, gate):
    tokens = inputs([-2.0, -3.0], behaviour=[-1.0, -1.0], advantages=[advantage] * 2)
    statistics = RolloutStatistics.of(tokens, 1)
    assert -float(statistics.drift + statistics.mismatch) / 2 == pytest.approx(1.5)
    loss = load_loss("clipped", {"sequence_mask_delta": 1.0})(tokens, normaliser(2))
    assert float(loss.metrics["train/gated_share"][0]) == 2 * (1 - gate)
    assert (loss.loss.item() != 0) == bool(gate)
    assert load_loss("clipped", {"sequence_mask_delta": 1.6})(tokens, normaliser(2)).loss.item() != 0


@pytest.mark.parametrize(("mean_log_c", "kept"), [(0.0, True), (0.0095, True), (0.0105, False), (-0.0105, False)])
def test_geometric_gate(mean_log_c, kept):
    # single tokens may be far off as long as their mean is not
    proximal = values(-1 + 0.5 + mean_log_c, -1 - 0.5 + mean_log_c)
    tokens = inputs(proximal, behaviour=[-1.0, -1.0], proximal_logprobs=proximal)
    loss = load_loss("clipped", {"geometric_low": 0.99, "geometric_high": 1.01})(tokens, normaliser(2))
    assert (loss.loss.item() != 0) == kept


# -- KL


def test_the_unbiased_kl_has_the_right_expectation():
    theta, mu, ref = values(0.5, 0.3, 0.2), values(0.2, 0.3, 0.5), values(0.3, 0.3, 0.4)
    kl, _ = unbiased_kl(theta.log(), mu.log(), ref.log())
    assert float((mu * kl).sum()) == pytest.approx(0.11678, abs=5e-6)
    assert float((theta * (theta / ref).log()).sum()) == pytest.approx(0.11678, abs=5e-6)
    assert float((mu * (ref / theta - (ref / theta).log() - 1)).sum()) == pytest.approx(0.17559, abs=5e-6)


@pytest.mark.parametrize("mu", [(0.5, 0.3, 0.2), (0.2, 0.3, 0.5)])
def test_the_kl_gradient_is_the_exact_one(mu):
    logits = values(0.5, 0.3, 0.2).log().requires_grad_()
    ref, mu_A = values(0.3, 0.3, 0.4), values(*mu)
    logprobs = torch.log_softmax(logits, -1)
    tokens = LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=mu_A.log(),
        advantages=torch.zeros(3, dtype=F64),
        mask=torch.ones(3, dtype=torch.bool),
        rollout=torch.arange(3),
        reference_logprobs=ref.log(),
    )

    class Expected(Normaliser):
        def token_weights(self, tokens):
            return mu_A

    n = Expected(reduction=Reduction.token_mean, rollout_tokens=torch.ones(3, dtype=torch.int64))
    loss = load_loss("clipped", {"kl_coef": 1.0})(tokens, n).loss
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad, values(0.1970, -0.0350, -0.1620), rtol=0, atol=6e-5)


# -- the exponent


def test_a_masked_stale_token_does_not_overflow():
    tokens = inputs(
        [-1.0, -0.5, -2.0], behaviour=[-1.1, -0.4, -100.0], advantages=[1.0, -1.0, 1.0], mask=[True, True, False],
        dtype=torch.float32,
    )  # fmt: skip
    n = normaliser(2)
    out = load_loss("clipped")(tokens, n)
    assert (out.loss / n.denominator).item() == pytest.approx(-0.10016675, rel=1e-6)
    (grad,) = torch.autograd.grad(out.loss, tokens.logprobs)
    assert grad.isfinite().all()
    assert grad[2].item() == 0
    assert float(out.metrics["train/overflow_share"][0]) == 0


def test_a_padded_kl_term_contributes_nothing():
    tokens = inputs([-1.0, 0.0], behaviour=[-1.0, 0.0], advantages=[0.0, 0.0], mask=[True, False], dtype=torch.float32,
                    reference_logprobs=torch.tensor([-1.0, -1e10]))  # fmt: skip
    out = load_loss("clipped", {"kl_coef": 1.0})(tokens, normaliser(1))
    (grad,) = torch.autograd.grad(out.loss, tokens.logprobs)
    assert out.loss.item() == 0
    assert grad.tolist() == [0, 0]


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("bad", [(-2.0, -100.0), (float("nan"), -1.0), (-1.0, float("nan")), (-float("inf"), -1.0)])
def test_overflow_on_a_trained_token_is_reported_not_hidden(name, bad):
    logprob, behaviour = bad
    tokens = inputs([-1.0, logprob], behaviour=[-1.0, behaviour], rollout=[0, 1], dtype=torch.float32)
    out = load_loss(name)(tokens, normaliser(1, 1))
    total, weight = out.metrics["train/overflow_share"]
    assert float(total) / weight == 0.5
    assert out.loss.isnan()  # the trainer skips and counts a step whose loss is not finite
    assert all(torch.as_tensor(v).isfinite() for v, _ in out.metrics.values())


def test_the_largest_exponents_still_work():
    for dtype, largest in ((torch.float32, 88.7), (F64, 709.7)):
        exp, is_bad = safe_exp(torch.tensor([largest, largest + 0.2, -2000.0], dtype=dtype))
        assert is_bad.tolist() == [False, True, False]
        assert exp.isfinite().all()
