"""Losses: sums of a step, and what no registered loss may depend on: cut, order, padding, segmentation, dead options."""

import itertools
from dataclasses import fields, replace

import pytest
import torch
from loss_inputs import F64, inputs, normaliser

from burnish.envs.errors import UserError
from burnish.policy.training.step import reduce_metrics
from burnish.rollout.loss_terms import Corrections, LossInputs, Normaliser, Reduction, RolloutStatistics
from burnish.rollout.losses import LOSSES, Loss, TokenLoss, load_loss
from burnish.rollout.plugins import options_of


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
