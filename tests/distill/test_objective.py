"""The loss of a step: one denominator, and nothing that depends on how the step is cut, ordered or spread over ranks."""

import itertools

import pytest
import torch

from burnish.distill.config import DistillAlgoConfig
from burnish.distill.objective import StepWeights, loss_sum
from burnish.envs.errors import UserError
from burnish.policy.training.divergence import Sides, divergence
from burnish.policy.training.step import reduce_metrics

F64 = torch.float64
REDUCTIONS = ("token_mean", "rollout_mean")
TEACHERS = ("coding", "terminal")
LENGTHS = (3, 1, 7, 2, 5)
TEACHER = (0, 1, 0, 0, 1)  # of each rollout
WEIGHT = (1.0, 3.0)  # of each teacher


@pytest.fixture(scope="module")
def step():
    """Hidden states of five rollouts under the student and under the teacher of each; heads of the teachers."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=F64)

    n, vocabulary = sum(LENGTHS), 50
    return {
        "hidden": draw(n, 8).requires_grad_(),
        "head": (draw(vocabulary, 8) * 0.5).requires_grad_(),
        "states": draw(n, 6),
        "heads": [draw(vocabulary, 6) * 0.5 for _ in TEACHERS],
        "rollout": torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
    }


def weights_of(reduction) -> StepWeights:
    weight = torch.tensor([WEIGHT[t] for t in TEACHER])
    return StepWeights.of(weight, torch.tensor(LENGTHS), reduction)


def found_of(step, tokens, teacher, algo):
    sides = Sides(
        student_hidden=step["hidden"][tokens],
        student_head=step["head"],
        teacher_hidden=step["states"][tokens],
        teacher_head=step["heads"][teacher],
        excluded=torch.arange(50) == 7,
        num_ids=50,
    )
    return divergence(sides, beta=algo.beta, temperature=algo.temperature, chunk=algo.vocabulary_chunk)


def result(step, parts, algo):
    """(loss, gradients, metrics) of a step whose tokens come in these parts, each of one teacher."""
    weights = weights_of(algo.reduction)
    sums = []
    for tokens in parts:
        rollout = step["rollout"][tokens]
        (teacher,) = {TEACHER[r] for r in rollout.tolist()}
        sums.append(loss_sum(found_of(step, tokens, teacher, algo), rollout, weights, TEACHERS[teacher], algo))
    total = torch.stack([s.loss for s in sums]).sum() / weights.denominator
    gradients = torch.autograd.grad(total, [step["hidden"], step["head"]])
    metrics = reduce_metrics([{k: (float(v), float(w)) for k, (v, w) in s.metrics.items()} for s in sums])
    return total, gradients, metrics


def by_rollout() -> list[torch.Tensor]:
    ends = list(itertools.accumulate(LENGTHS))
    return [torch.arange(end - size, end) for end, size in zip(ends, LENGTHS, strict=True)]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("beta", [1.0, 0.0, 0.5])
def test_a_step_does_not_depend_on_how_it_is_cut(step, reduction, beta):
    algo = DistillAlgoConfig(reduction=reduction, beta=beta, temperature=1.3, vocabulary_chunk=17)
    rollouts = by_rollout()
    joined = [torch.cat([rollouts[i] for i, t in enumerate(TEACHER) if t == teacher]) for teacher in (0, 1)]
    whole = result(step, joined, algo)
    cuts = {
        "a rollout each": rollouts,
        "another order": rollouts[::-1],
        "a token each": [token.unsqueeze(0) for part in rollouts for token in part],
        "rollouts cut in the middle": [half for part in rollouts for half in part.split(2)],
        "permuted within": [part.flip(0) for part in joined],
    }
    for name, parts in cuts.items():
        got = result(step, parts, algo)
        torch.testing.assert_close(got[0], whole[0], rtol=1e-12, atol=1e-14, msg=name)
        for a, b in zip(got[1], whole[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14, msg=name)
        assert got[2] == pytest.approx(whole[2], rel=1e-12), name


def test_the_loss_is_the_weighted_mean_that_it_says(step):
    algo = DistillAlgoConfig()
    with torch.no_grad():
        means = [
            found_of(step, part, t, algo).value.mean().item() for part, t in zip(by_rollout(), TEACHER, strict=True)
        ]
    tokens = sum(WEIGHT[t] * n * m for t, n, m in zip(TEACHER, LENGTHS, means, strict=True))
    rollouts = sum(WEIGHT[t] * m for t, m in zip(TEACHER, means, strict=True))
    right = {
        "token_mean": tokens / sum(WEIGHT[t] * n for t, n in zip(TEACHER, LENGTHS, strict=True)),
        "rollout_mean": rollouts / sum(WEIGHT[t] for t in TEACHER),
    }
    for reduction, value in right.items():
        got = result(step, by_rollout(), DistillAlgoConfig(reduction=reduction))
        assert got[0].item() == pytest.approx(value, rel=1e-12)


def test_weights_are_relative_and_a_rollout_without_a_token_counts_nowhere():
    for reduction in REDUCTIONS:
        once = StepWeights.of(torch.tensor([1.0, 3.0, 3.0]), torch.tensor([4, 2, 0]), reduction)
        twice = StepWeights.of(torch.tensor([2.0, 6.0, 6.0]), torch.tensor([4, 2, 0]), reduction)
        torch.testing.assert_close(once.token / once.denominator, twice.token / twice.denominator)
        alone = StepWeights.of(torch.tensor([1.0, 3.0]), torch.tensor([4, 2]), reduction)
        assert alone.denominator == once.denominator


def test_metrics_say_whose_tokens_they_are(step):
    _, _, metrics = result(step, by_rollout(), DistillAlgoConfig())
    names = {"distill/kl", "distill/coding/kl", "distill/terminal/kl", "distill/entropy"}
    assert names <= set(metrics)
    tokens = [sum(n for n, t in zip(LENGTHS, TEACHER, strict=True) if t == teacher) for teacher in (0, 1)]
    mean = (tokens[0] * metrics["distill/coding/kl"] + tokens[1] * metrics["distill/terminal/kl"]) / sum(tokens)
    assert metrics["distill/kl"] == pytest.approx(mean)
    assert "distill/divergence" in result(step, by_rollout(), DistillAlgoConfig(beta=0.5))[2], "an interior is no KL"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        # the interior tends to 0 there: a clamped 1 trained on 4e-7
        ({"beta": 1 - 1e-6}, "algo.beta must be 0, 1, or 0.05 to 0.95, got 0.999999"),
        ({"beta": 0.01}, "algo.beta must be 0, 1, or 0.05 to 0.95"),
        ({"beta": 2.0}, "algo.beta must be 0, 1, or 0.05 to 0.95"),
        ({"temperature": 0.0}, "algo.temperature must be > 0"),
        ({"reduction": "mean"}, "algo.reduction must be one of token_mean, rollout_mean"),
        ({"vocabulary_chunk": 0}, "algo.vocabulary_chunk must be >= 1"),
        ({"groups_per_step": 0}, "algo.groups_per_step must be >= 1"),
    ],
)
def test_settings_that_nothing_could_run_with_are_named(options, says):
    with pytest.raises(UserError, match=says):
        DistillAlgoConfig(**options)
