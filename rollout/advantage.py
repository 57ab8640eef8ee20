"""Advantages: how much better a rollout was than what is expected of its task.

Every estimator is a pure function over the rollouts of a batch: one number a rollout, however many turns, contexts or
packed rows it has. Only valid rollouts count, those with a reward and at least one trainable token; an invalid one gets
0 and moves nobody's baseline. A group whose valid rewards are all equal gets exactly 0, found by max == min, never by a
standard deviation. A group with one valid member gets 0: there is nothing to compare it with.

Plain float64 arithmetic, no torch: the controller computes these. Sources: Shao 2024 (GRPO), Liu 2025 (Dr.GRPO),
Ahmadian 2024 (RLOO), Hu 2025 (REINFORCE++).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.rollout.plugins import bind, resolve


@dataclass(frozen=True, kw_only=True)
class RolloutScores:
    """The rollouts of one batch, one entry each in every field."""

    rewards: Sequence[float]
    """Ignored where not valid."""
    group_ids: Sequence[str]
    """What the reward is compared within: (task, effort, pass), by identity, never by content."""
    valid: Sequence[bool]
    """Has a reward and at least one trainable token."""
    num_tokens: Sequence[int]
    """Trainable tokens over all turns and contexts."""

    def __post_init__(self) -> None:
        lengths = {len(self.rewards), len(self.group_ids), len(self.valid), len(self.num_tokens)}
        if len(lengths) != 1:
            raise ValueError(f"one entry a rollout in every field, got lengths {sorted(lengths)}")
        for i, (reward, is_valid) in enumerate(zip(self.rewards, self.valid, strict=True)):
            if is_valid and not math.isfinite(reward):
                raise ValueError(
                    f"rollout {i} of group {self.group_ids[i]}: reward {reward} is not a number to learn from"
                )

    @property
    def valid_indices(self) -> list[int]:
        return [i for i, is_valid in enumerate(self.valid) if is_valid]

    def groups(self) -> dict[str, list[int]]:
        """Indices of the valid rollouts of each group."""
        members: dict[str, list[int]] = {}
        for i in self.valid_indices:
            members.setdefault(self.group_ids[i], []).append(i)
        return members


AdvantageFn = Callable[..., list[float]]
"""(scores, *, options) -> one advantage a rollout; 0 where not valid."""


def is_constant(rewards: Sequence[float]) -> bool:
    """True when a group says nothing: fewer than two rewards, or all of them equal.

    The zero-variance filter uses this on the declared task reward, not on one that was shaped (length, format).
    """
    return len(rewards) < 2 or max(rewards) == min(rewards)


def centred(scores: RolloutScores) -> list[float]:
    """R - mean of the group (Dr.GRPO, DeepSeek V3.2). The default."""
    return _by_group(scores, lambda rewards: _centre(rewards))


def dr_grpo(scores: RolloutScores) -> list[float]:
    """R - mean of the group; what else Dr.GRPO changes is the loss normaliser (`constant`)."""
    return centred(scores)


def grpo(scores: RolloutScores, *, eps: float = 1e-6, is_sample_std: bool = True) -> list[float]:
    """(R - mean) / (std + eps) of the group.

    Args:
        is_sample_std: divide the variance by n - 1 (else by n).
    """

    def normalise(rewards: list[float]) -> list[float]:
        # two passes: the mean of squares minus the square of the mean loses everything for near-equal rewards
        centre = _centre(rewards)
        variance = math.fsum(c * c for c in centre) / (len(rewards) - is_sample_std)
        return [c / (math.sqrt(variance) + eps) for c in centre]

    return _by_group(scores, normalise)


def rloo(scores: RolloutScores) -> list[float]:
    """R - mean of the other members."""

    def leave_one_out(rewards: list[float]) -> list[float]:
        n = len(rewards)
        return [c * n / (n - 1) for c in _centre(rewards)]

    return _by_group(scores, leave_one_out)


def maxrl(scores: RolloutScores) -> list[float]:
    """(R - mean) / mean of the group: hard tasks weigh more. For rewards that are never negative."""

    def relative(rewards: list[float]) -> list[float]:
        if min(rewards) < 0:
            raise ValueError(f"advantage maxrl divides by the mean reward: rewards must be >= 0, got {min(rewards)}")
        mean = math.fsum(rewards) / len(rewards)
        return [c / mean for c in _centre(rewards)]

    return _by_group(scores, relative)


def reinforce_pp(scores: RolloutScores, *, eps: float = 1e-8) -> list[float]:
    """REINFORCE++ with one reward at the end and gamma = 1: every trained token carries its rollout's return, whitened
    over all trained tokens of the global batch (not of a group, not of a rank)."""
    picked = scores.valid_indices
    result = [0.0] * len(scores.rewards)
    if not is_constant([scores.rewards[i] for i in picked]):
        values = whiten([scores.rewards[i] for i in picked], [scores.num_tokens[i] for i in picked], eps=eps)
        for i, value in zip(picked, values, strict=True):
            result[i] = value
    return result


def discounted_returns(rewards: Sequence[float], mask: Sequence[bool], gamma: float = 1.0) -> list[float]:
    """Return at each trained token of one rollout; 0 at the others.

    Tokens the policy did not sample neither reset the running return nor discount it nor add to it: a tool result in
    the middle must not cut earlier turns off from the outcome, and a KL penalty on it must not count.

    Args:
        rewards: per token (outcome on the last trained token, minus a KL penalty where there is one).
    """
    returns = [0.0] * len(rewards)
    running = 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            running = rewards[t] + gamma * running
            returns[t] = running
    return returns


def whiten(values: Sequence[float], weights: Sequence[float], *, eps: float = 1e-8) -> list[float]:
    """(value - mean) / (std + eps) with weighted population statistics over the whole global batch."""
    total = math.fsum(weights)
    if total <= 0:
        raise ValueError(f"whitening needs tokens, got total weight {total}")
    mean = math.fsum(v * w for v, w in zip(values, weights, strict=True)) / total
    variance = math.fsum((v - mean) ** 2 * w for v, w in zip(values, weights, strict=True)) / total
    return [(v - mean) / (math.sqrt(variance) + eps) for v in values]


ADVANTAGES: dict[str, AdvantageFn] = {
    "centred": centred,
    "dr_grpo": dr_grpo,
    "grpo": grpo,
    "maxrl": maxrl,
    "reinforce_pp": reinforce_pp,
    "rloo": rloo,
}


def load_advantage(spec: str, options: Mapping[str, Any] | None = None) -> Callable[[RolloutScores], list[float]]:
    """The estimator a setting names, with its options fixed and its answer checked.

    Args:
        spec: a name in `ADVANTAGES`, or `package.module:function` of type AdvantageFn.

    Raises:
        UserError: no such estimator or option. The returned function raises ValueError when an estimator gives another
            number of advantages than rollouts, one that is not finite, or one other than 0 to an invalid rollout.
    """
    compute = bind(resolve(spec, ADVANTAGES, "advantage"), options or {}, "advantage", spec)

    def checked(scores: RolloutScores) -> list[float]:
        values = [float(v) for v in compute(scores)]
        if len(values) != len(scores.rewards):
            raise ValueError(f"advantage={spec!r} gave {len(values)} values for {len(scores.rewards)} rollouts")
        for i, (value, is_valid) in enumerate(zip(values, scores.valid, strict=True)):
            if not math.isfinite(value) or (not is_valid and value != 0):
                raise ValueError(f"advantage={spec!r} gave {value} to rollout {i} (valid: {is_valid})")
        return values

    return checked


def _centre(rewards: Sequence[float]) -> list[float]:
    # differences first: subtracting the first reward makes near-equal large rewards exact
    shifted = [r - rewards[0] for r in rewards]
    mean = math.fsum(shifted) / len(shifted)
    return [s - mean for s in shifted]


def _by_group(scores: RolloutScores, estimate: Callable[[list[float]], list[float]]) -> list[float]:
    result = [0.0] * len(scores.rewards)
    for indices in scores.groups().values():
        rewards = [scores.rewards[i] for i in indices]
        if is_constant(rewards):
            continue
        for i, value in zip(indices, estimate(rewards), strict=True):
            result[i] = value
    return result
