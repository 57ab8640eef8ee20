"""Losses: golden numbers, and what no registered loss may depend on: cut, order, padding, segmentation, dead options."""

import itertools
from dataclasses import fields, replace

import pytest
import torch

from burnish.envs.errors import UserError
from burnish.policy.training.logprobs import sampled_logprobs
from burnish.policy.training.step import reduce_metrics
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
from burnish.rollout.losses import LOSSES, Loss, TokenLoss, load_loss
from burnish.rollout.plugins import options_of

F64 = torch.float64


def values(*numbers, dtype=F64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


def inputs(logprobs, behaviour=None, advantages=None, mask=None, rollout=None, dtype=F64, **more) -> LossInputs:
    lp = torch.as_tensor(logprobs, dtype=dtype).clone().requires_grad_()
    n = len(lp)
    return LossInputs(
        logprobs=lp,
        behaviour_logprobs=lp.detach().clone() if behaviour is None else torch.as_tensor(behaviour, dtype=dtype),
        advantages=torch.ones(n, dtype=dtype) if advantages is None else torch.as_tensor(advantages, dtype=dtype),
        mask=torch.ones(n, dtype=torch.bool) if mask is None else torch.as_tensor(mask, dtype=torch.bool),
        rollout=torch.zeros(n, dtype=torch.int64) if rollout is None else torch.as_tensor(rollout),
        **more,
    )


def normaliser(*tokens: int, reduction=Reduction.token_mean, max_len=0) -> Normaliser:
    return Normaliser(reduction=reduction, rollout_tokens=torch.tensor(tokens), max_len=max_len)


def plain(tokens: LossInputs, statistics) -> TokenLoss:
    """The token's loss is its log-probability: golden numbers of aggregation can be put in directly."""
    return TokenLoss(loss=tokens.logprobs, is_bad=torch.zeros_like(tokens.mask))


PLAIN = Loss(name="plain", function=plain, corrections=Corrections(), needs_statistics=False)


# -- aggregation


def test_short_ranks_are_not_over_weighted():
    n = normaliser(4, 1)
    a, b = inputs([1, 1, 1, 1]), inputs([3], rollout=[1])
    assert ((PLAIN(a, n).loss + PLAIN(b, n).loss) / n.denominator).item() == pytest.approx(1.4)


def test_token_mean_is_not_a_mean_of_micro_batch_means():
    n = normaliser(1, 9)
    short, long = inputs([10.0]), inputs([1.0] * 9, rollout=[1] * 9)
    assert ((PLAIN(short, n).loss + PLAIN(long, n).loss) / n.denominator).item() == pytest.approx(1.9)


def test_token_mean_of_two_ranks():
    # rank 0: samples [1, 3] and six of 0.5 in micro-batches of one; rank 1: four of 2.0
    parts = [inputs([1.0, 3.0]), inputs([0.5] * 6, rollout=[1] * 6), inputs([2.0] * 4, rollout=[2] * 4)]
    n = normaliser(2, 6, 4)
    shares = [
        PLAIN(part, n).loss.item() / n.denominator * 2 for part in parts
    ]  # x 2: gradients are averaged over ranks
    assert shares == pytest.approx([0.666667, 0.5, 1.333333], rel=1e-6)
    assert sum(shares) / 2 == pytest.approx(1.25)
    alone = normaliser(2, 6)
    assert sum(PLAIN(part, alone).loss.item() for part in parts[:2]) / alone.denominator == pytest.approx(0.875)


def test_masked_truncated_completions_leave_the_denominator():
    both = inputs([1.0] * 20, mask=[True] * 10 + [False] * 10, rollout=[0] * 10 + [1] * 10)
    for reduction, denominator in ((Reduction.token_mean, 10), (Reduction.rollout_mean, 1)):
        n = normaliser(10, 0, reduction=reduction)
        assert n.denominator == denominator
        assert (PLAIN(both, n).loss / n.denominator).item() == pytest.approx(1.0)


def test_a_compacted_rollout_does_not_count_double():
    # A (advantage 1) in segments of 10 and 30 tokens, B (advantage -1) of 20
    def mean(reduction, max_len=0):
        n = normaliser(40, 20, reduction=reduction, max_len=max_len)
        segments = [(10, 0, 1.0), (30, 0, 1.0), (20, 1, -1.0)]
        total = sum(PLAIN(inputs([a] * k, rollout=[i] * k), n).loss.item() for k, i, a in segments)
        return total / n.denominator

    assert mean(Reduction.token_mean) == pytest.approx(1 / 3)
    assert mean(Reduction.rollout_mean) == pytest.approx(0.0, abs=1e-12)
    assert mean(Reduction.constant, max_len=50) == pytest.approx(20 / 100)
    with pytest.raises(UserError, match="reduction=constant needs max_len"):
        mean(Reduction.constant)


def test_metrics_are_weighted_by_tokens():
    assert reduce_metrics([{"x": (2, 1)}, {"x": (0, 9)}]) == {"x": pytest.approx(0.2)}
    n = normaliser(1, 9)
    parts = [inputs([0.0], advantages=[2.0]), inputs([0.0] * 9, advantages=[0.0] * 9, rollout=[1] * 9)]
    shares = [{k: (float(v), float(w)) for k, (v, w) in PLAIN(part, n).metrics.items()} for part in parts]
    assert reduce_metrics(shares)["train/advantage"] == pytest.approx(0.2)


# -- every registered loss


def batch(dtype=F64, seed=0, num_rollouts=5) -> tuple[LossInputs, Normaliser]:
    """A crafted batch: both signs of advantage, ratios on both sides of every clip, masked holes, all optional inputs."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (num_rollouts,), generator=g)
    rollout = torch.repeat_interleave(torch.arange(num_rollouts), lengths)
    n = len(rollout)

    def noise(scale):
        return torch.randn(n, generator=g, dtype=F64) * scale

    lp = -torch.rand(n, generator=g, dtype=F64) * 3 - 0.05
    mask = torch.rand(n, generator=g) > 0.25
    proximal = lp + noise(0.4)
    made = inputs(
        lp,
        behaviour=proximal + noise(0.5),
        advantages=torch.tensor([1.5, -1.0, 0.5, -0.25, 2.0])[rollout % 5],
        mask=mask,
        rollout=rollout,
        dtype=dtype,
        proximal_logprobs=proximal.to(dtype),
        reference_logprobs=(lp + noise(0.3)).to(dtype),
        entropy=(-lp).to(dtype).requires_grad_(),
    )
    return made, Normaliser(
        reduction=Reduction.rollout_mean,
        rollout_tokens=torch.bincount(rollout[mask], minlength=num_rollouts),
        max_len=20,
    )


EVERYTHING = {
    "icepop_low": 0.6, "icepop_high": 1.8, "geometric_low": 0.5, "geometric_high": 2.0, "sequence_mask_delta": 0.1,
    "kl_coef": 0.1, "entropy_coef": 0.01,
}  # fmt: skip
SETTINGS = {"bare": {}, "everything": EVERYTHING, "tis": {"tis_cap": 1.2}}
registered = pytest.mark.parametrize("name", sorted(LOSSES))


def select(tokens: LossInputs, index: torch.Tensor) -> LossInputs:
    """These tokens, with views into the same leaves, so that gradients of parts add up."""
    return replace(tokens, **{f.name: getattr(tokens, f.name)[index] for f in fields(tokens)})


def result(loss: Loss, parts: list[LossInputs], leaves: LossInputs, n: Normaliser):
    """(loss, gradients, metrics) of a step cut into these parts."""
    statistics = sum(
        (RolloutStatistics.of(p, len(n.rollout_tokens)) for p in parts[1:]),
        RolloutStatistics.of(parts[0], len(n.rollout_tokens)),
    )
    sums = [loss(part, n, statistics if loss.needs_statistics else None) for part in parts]
    total = torch.stack([s.loss for s in sums]).sum() / n.denominator
    wanted = [leaves.logprobs, leaves.entropy]
    grads = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
    shares = [{k: (float(v), float(w)) for k, (v, w) in s.metrics.items()} for s in sums]
    return total.detach(), grads, reduce_metrics(shares)


def assert_same(a, b):
    torch.testing.assert_close(a[0], b[0], rtol=1e-6, atol=1e-9)
    for x, y in zip(a[1], b[1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-9)
    assert a[2] == pytest.approx(b[2], rel=1e-6, abs=1e-9)


@registered
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("reduction", "dtype"), [(Reduction.rollout_mean, torch.float32), *((reduction, F64) for reduction in Reduction)]
)
def test_no_loss_depends_on_how_the_step_is_cut(name, reduction, setting, dtype):
    loss = load_loss(name, SETTINGS[setting])
    tokens, n = batch(dtype)
    n = replace(n, reduction=reduction)
    whole = result(loss, [tokens], tokens, n)
    assert whole[0].isfinite()
    assert whole[1][0].abs().sum() > 0
    size = len(tokens)
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(size, generator=generator)
    by_rollout = [torch.nonzero(tokens.rollout == i).squeeze(1) for i in range(5)]
    cuts = {
        "order": [order],
        "2 micro-batches": list(order.chunk(2)),
        "4 micro-batches": list(torch.arange(size).chunk(4)),
        "one rollout each": by_rollout,
        "one token each": list(torch.arange(size).split(1)),
        "segments": [piece for rows in by_rollout for piece in rows.chunk(3)],
        "an empty micro-batch": [torch.arange(size), torch.arange(0)],
    }
    for what, cut in cuts.items():
        cut_result = result(loss, [select(tokens, index) for index in cut], tokens, n)
        try:
            assert_same(whole, cut_result)
        except AssertionError as error:
            raise AssertionError(f"{name} depends on: {what}") from error


def test_a_loss_that_divides_by_its_micro_batch_would_be_caught():
    def wrong(tokens: LossInputs, statistics) -> TokenLoss:
        return replace(plain(tokens, statistics), loss=-tokens.advantages * tokens.logprobs / len(tokens))

    tokens, n = batch()
    loss = replace(PLAIN, function=wrong)
    whole = result(loss, [tokens], tokens, n)
    with pytest.raises(AssertionError):
        assert_same(whole, result(loss, [select(tokens, i) for i in torch.arange(len(tokens)).chunk(2)], tokens, n))


@registered
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf"), -float("inf"), 1e30])
def test_padding_changes_nothing_bit_for_bit(name, setting, poison):
    loss = load_loss(name, SETTINGS[setting])
    tokens, n = batch(torch.float32)
    for extra in (1, 7, 64):
        padded = LossInputs(
            **{
                f.name: torch.cat(
                    [v := getattr(tokens, f.name), torch.full((extra,), poison).nan_to_num(-1, -1, -1).to(v.dtype)]
                    if not getattr(tokens, f.name).is_floating_point()
                    else [v := getattr(tokens, f.name), torch.full((extra,), poison, dtype=v.dtype)]
                )
                for f in fields(tokens)
                if f.name != "mask"
            },
            mask=torch.cat([tokens.mask, torch.zeros(extra, dtype=torch.bool)]),
        )
        plain_result, padded_result = result(loss, [tokens], tokens, n), result(loss, [padded], tokens, n)
        assert torch.equal(plain_result[0], padded_result[0])
        assert all(torch.equal(a, b) for a, b in zip(plain_result[1], padded_result[1], strict=True))
        assert plain_result[2] == padded_result[2]


@registered
def test_masked_tokens_get_exactly_no_gradient(name):
    tokens, n = batch()
    _, (grad, _), _ = result(load_loss(name, EVERYTHING), [tokens], tokens, n)
    assert (grad[~tokens.mask] == 0).all()


KNOBS = {
    "clip_low": 0.5, "clip_high": 0.6, "dual_clip": 1.1, "delta": 0.01, "tau": 1.0,
    "tis_cap": 0.7, "icepop_low": 0.9, "icepop_high": 1.1, "geometric_low": 0.95, "geometric_high": 1.1,
    "sequence_mask_delta": -1.0, "kl_coef": 1.0, "entropy_coef": 1.0,
}  # fmt: skip
OPTIONS = [
    (name, option)
    for name, function in sorted(LOSSES.items())
    for option in (*options_of(function), *(f.name for f in fields(Corrections)))
]


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_no_option_is_a_dead_knob(name, option):
    family = option.split("_")[0]
    base = {k: v for k, v in EVERYTHING.items() if k.startswith(family) and "_coef" not in k and k != option}
    base |= {option: EVERYTHING[option]} if family in ("icepop", "geometric") else {}
    tokens, n = batch(num_rollouts=20)
    before = result(load_loss(name, base), [tokens], tokens, n)
    after = result(load_loss(name, {**base, option: KNOBS[option]}), [tokens], tokens, n)
    assert not torch.allclose(before[0], after[0], rtol=1e-6), f"{name}: {option} changes no loss"
    moved = any(not torch.allclose(a, b, rtol=1e-6) for a, b in zip(before[1], after[1], strict=True))
    assert moved, f"{name}: {option} changes no gradient"


@pytest.mark.parametrize("option", ["proximal_logprobs", "reference_logprobs", "advantages", "behaviour_logprobs"])
def test_every_input_matters(option):
    tokens, n = batch()
    loss = load_loss("clipped", EVERYTHING)
    other = replace(tokens, **{option: getattr(tokens, option) + 0.3})
    assert not torch.allclose(result(loss, [tokens], tokens, n)[0], result(loss, [other], tokens, n)[0])


@registered
def test_raising_a_good_tokens_probability_lowers_every_loss(name):
    tokens, n = batch()
    near = replace(tokens, proximal_logprobs=None, behaviour_logprobs=tokens.logprobs.detach().clone())
    _, (grad, _), _ = result(load_loss(name), [near], near, n)
    trained = tokens.mask
    assert (torch.sign(grad[trained]) == -torch.sign(tokens.advantages[trained])).all()


@registered
def test_on_policy_every_loss_has_the_policy_gradient(name):
    """At rho = 1 all of them are REINFORCE: d loss / d log pi = -A / (B T_i)."""
    tokens, n = batch()
    near = replace(tokens, proximal_logprobs=None, behaviour_logprobs=tokens.logprobs.detach().clone())
    _, (grad, _), metrics = result(load_loss(name), [near], near, n)
    expected = -tokens.advantages / n.rollout_tokens[tokens.rollout] / n.denominator
    torch.testing.assert_close(grad[tokens.mask], expected[tokens.mask], rtol=1e-9, atol=0)
    assert metrics["train/mismatch_kl"] == pytest.approx(0, abs=1e-12)


# -- the single terms


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


@registered
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


# -- what was sampled from


def test_temperature_divides_logits_not_logprobs():
    lp = sampled_logprobs(values(2.0, 0.0).unsqueeze(0), torch.tensor([0]), temperature=2.0)
    assert lp.item() == pytest.approx(-0.3133, abs=5e-5)
    assert (torch.log_softmax(values(2.0, 0.0), -1)[0] / 2).item() == pytest.approx(-0.0635, abs=5e-5)


def test_the_kept_set_shares_one_action_space():
    logits = values(0.5, 0.3, 0.15, 0.05).log().expand(3, 4).clone().requires_grad_()
    kept = {"kept_ids_M": torch.tensor([0, 1, 1, 0]), "kept_offsets": torch.tensor([0, 2, 2, 4])}
    lp = sampled_logprobs(logits, torch.tensor([0, 0, 1]), **kept)
    torch.testing.assert_close(lp, values(0.5 / 0.8, 0.5, 0.3 / 0.8).log())  # the empty set is the full vocabulary
    assert lp[0].item() == pytest.approx(-0.4700, abs=5e-5)
    assert lp[1].item() == pytest.approx(-0.6931, abs=5e-5)
    (grad,) = torch.autograd.grad(lp[0], logits)
    torch.testing.assert_close(grad[0], values(1 - 0.625, -0.375, 0, 0))
    assert (grad[1:] == 0).all()
    # engine and trainer agree: the ratio is 1, not 0.8
    out = load_loss("clipped")(inputs(lp.detach(), behaviour=values(0.625, 0.5, 0.375).log()), normaliser(3))
    assert float(out.metrics["train/ratio"][0]) == pytest.approx(3)
    with pytest.raises(ValueError, match=r"token 0 \(id 3\) is not in its kept set of 2 ids"):
        sampled_logprobs(logits, torch.tensor([3, 0, 1]), **kept)
    with pytest.raises(ValueError, match="temperature must be > 0"):
        sampled_logprobs(logits, torch.tensor([0, 0, 1]), temperature=0.0)


# -- plug-ins and mistakes


def test_an_import_path_plugs_in_and_cannot_get_the_denominator_wrong(monkeypatch, tmp_path):
    (tmp_path / "my_losses.py").write_text(
        "from burnish.rollout.losses import TokenLoss\n"
        "def linear(tokens, statistics, *, scale=1.0):\n"
        "    return TokenLoss(loss=-scale * tokens.advantages * tokens.logprobs, is_bad=~tokens.logprobs.isfinite())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    loss = load_loss("my_losses:linear", {"scale": 2.0, "kl_coef": 0.1, "sequence_mask_delta": 0.1})
    tokens, n = batch()
    whole = result(loss, [tokens], tokens, n)
    assert_same(whole, result(loss, [select(tokens, i) for i in torch.arange(len(tokens)).chunk(4)], tokens, n))


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("gpro", {}, "loss='gpro': expected one of cispo, clipped, dapo"),
        ("nowhere:f", {}, "cannot import 'nowhere'"),
        ("burnish.rollout.losses:f", {}, "has no attribute 'f'"),
        (
            "clipped",
            {"clip_hi": 0.3},
            "loss='clipped' has no option 'clip_hi': expected clip_high, clip_low, dual_clip",
        ),
        ("cispo", {"clip_low": 0.3}, "has no option 'clip_low'"),
        ("clipped", {"tis_cap": 2.0, "icepop_low": 0.5, "icepop_high": 2.0}, "set one of them"),
        ("clipped", {"icepop_low": 0.5}, "set both"),
        ("clipped", {"geometric_low": 1.0, "geometric_high": 0.9}, "0 < low < high"),
        ("clipped", {"tis_cap": 0.0}, "tis_cap must be > 0"),
    ],
)
def test_a_wrong_setting_is_one_clear_sentence(spec, options, message):
    with pytest.raises(UserError, match=message):
        load_loss(spec, options)


@pytest.mark.parametrize(
    ("options", "missing", "message"),
    [
        ({"tis_cap": 2.0}, {"proximal_logprobs": None}, "1 in bypass mode"),
        ({"icepop_low": 0.5, "icepop_high": 2.0}, {"proximal_logprobs": None}, "1 in bypass mode"),
        ({"geometric_low": 0.9, "geometric_high": 1.1}, {"proximal_logprobs": None}, "1 in bypass mode"),
        ({"kl_coef": 0.1}, {"reference_logprobs": None}, "needs reference log-probabilities"),
        ({"entropy_coef": 0.1}, {"entropy": None}, "needs an entropy with its graph"),
    ],
)
def test_an_option_that_could_only_be_ignored_is_refused(options, missing, message):
    tokens, n = batch()
    with pytest.raises(UserError, match=message):
        load_loss("clipped", options)(replace(tokens, **missing), n)


def test_an_entropy_bonus_without_a_graph_is_refused():
    tokens, n = batch()
    assert tokens.entropy is not None
    with pytest.raises(UserError, match="entropy with its graph"):
        load_loss("clipped", {"entropy_coef": 0.1})(replace(tokens, entropy=tokens.entropy.detach()), n)


def test_options_of_all_losses_have_a_knob_here():
    named = set(itertools.chain.from_iterable(options_of(f) for f in LOSSES.values())) | {
        f.name for f in fields(Corrections)
    }
    assert named == set(KNOBS)
