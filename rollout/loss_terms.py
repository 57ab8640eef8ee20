"""What every policy loss is built from: the tokens, the one normaliser, rollout statistics, weights, gates and KL.

Notation: pi_theta the policy being trained, mu what the engine sampled from, pi_p the proximal policy (the trainer's own
scoring at the start of the update; equal to mu in bypass mode), pi_r a reference. rho = pi_theta / pi_p measures drift
within the update and is what a clip acts on; c = pi_p / mu measures staleness and numerical mismatch and only re-weights
or rejects.

Tokens that are not trained never enter: they are left out by selection before anything is computed, so no value there
(pad, NaN, -inf, a log-ratio of 1000) can reach a loss, a gradient or a metric. Shapes: T tokens, B rollouts.
"""

import math
from dataclasses import dataclass, fields, replace
from enum import StrEnum

import torch

from burnish.envs.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Tokens of one micro-batch, one entry each; order and padding do not matter."""

    logprobs: torch.Tensor
    """[T] log pi_theta of the sampled token, with its graph."""
    behaviour_logprobs: torch.Tensor
    """[T] log mu, as the engine recorded it."""
    advantages: torch.Tensor
    """[T] advantage of the token's rollout."""
    mask: torch.Tensor
    """[T] bool, True on the tokens that are trained."""
    rollout: torch.Tensor
    """[T] int64, 0..B-1 in the global batch; all contexts and turns of a rollout share it. Ignored where not masked in."""
    proximal_logprobs: torch.Tensor | None = None
    """[T] log pi_p; None is bypass mode (pi_p := mu)."""
    reference_logprobs: torch.Tensor | None = None
    """[T] log pi_r, for a KL term."""
    entropy: torch.Tensor | None = None
    """[T] nats, with its graph when an entropy bonus is wanted."""

    def __len__(self) -> int:
        return len(self.logprobs)

    def trained(self) -> "LossInputs":
        """Only the tokens that are trained; fixed quantities without graph."""
        keep = torch.nonzero(self.mask).squeeze(1)
        chosen = {
            f.name: None if (values := getattr(self, f.name)) is None else values.index_select(0, keep)
            for f in fields(self)
        }
        frozen = ("behaviour_logprobs", "advantages", "proximal_logprobs", "reference_logprobs")
        return replace(self, **chosen | {k: v.detach() for k in frozen if (v := chosen[k]) is not None})

    @property
    def proximal(self) -> torch.Tensor:
        """[T] log pi_p, in either mode."""
        return self.behaviour_logprobs if self.proximal_logprobs is None else self.proximal_logprobs


class Reduction(StrEnum):
    """What the summed loss is divided by. YAML spells the member name."""

    token_mean = "token_mean"
    """All trained tokens weigh the same: N = sum of T_i."""
    rollout_mean = "rollout_mean"
    """All rollouts weigh the same: 1 / (B T_i) a token."""
    constant = "constant"
    """Dr.GRPO: N = B x max_len, so that a long wrong answer is not cheaper a token."""


@dataclass(frozen=True, kw_only=True)
class Normaliser:
    """The one denominator of an optimizer step, known before its first micro-batch: over all ranks, micro-batches,
    contexts and packed rows. A loss is sum(token weight x token loss), divided once by `denominator`."""

    reduction: Reduction
    rollout_tokens: torch.Tensor
    """[B] trained tokens of each rollout of the GLOBAL batch, after every mask (length, age, truncation); T_i."""
    max_len: int = 0
    """Trained tokens a rollout may have at most, for `constant`."""

    def __post_init__(self) -> None:
        if self.reduction is Reduction.constant and self.max_len <= 0:
            raise UserError("reduction=constant needs max_len, the most tokens a rollout can have")

    @property
    def denominator(self) -> float:
        """Rollouts without a trained token count nowhere."""
        if self.reduction is Reduction.token_mean:
            return float(self.rollout_tokens.sum())
        rollouts = float((self.rollout_tokens > 0).sum())
        return rollouts * self.max_len if self.reduction is Reduction.constant else rollouts

    def token_weights(self, tokens: LossInputs) -> torch.Tensor:
        """[T] what each token's loss is multiplied by before the sum."""
        if self.reduction is Reduction.rollout_mean:
            return 1.0 / self.rollout_tokens.to(tokens.logprobs)[tokens.rollout]
        return torch.ones_like(tokens.advantages)


@dataclass(frozen=True, kw_only=True)
class RolloutStatistics:
    """Sums over all trained tokens of each rollout, without graph. They add up over micro-batches."""

    num_tokens: torch.Tensor
    """[B]"""
    drift: torch.Tensor
    """[B] float64, sum of log rho = log pi_theta - log pi_p."""
    mismatch: torch.Tensor
    """[B] float64, sum of log c = log pi_p - log mu."""

    @classmethod
    def of(cls, inputs: LossInputs, num_rollouts: int) -> "RolloutStatistics":
        """Of one micro-batch."""
        with torch.no_grad():
            tokens = inputs.trained()

            def total(values: torch.Tensor) -> torch.Tensor:
                zeros = torch.zeros(num_rollouts, dtype=torch.float64, device=values.device)
                return zeros.index_add(0, tokens.rollout, values.double())

            return cls(
                num_tokens=total(torch.ones_like(tokens.advantages)),
                drift=total(tokens.logprobs - tokens.proximal),
                mismatch=total(tokens.proximal - tokens.behaviour_logprobs),
            )

    def __add__(self, other: "RolloutStatistics") -> "RolloutStatistics":
        return RolloutStatistics(
            num_tokens=self.num_tokens + other.num_tokens,
            drift=self.drift + other.drift,
            mismatch=self.mismatch + other.mismatch,
        )

    def mean_drift(self, rollout: torch.Tensor) -> torch.Tensor:
        """[T] mean log rho of each token's rollout."""
        return (self.drift / self.num_tokens.clamp(min=1))[rollout]

    def mean_mismatch(self, rollout: torch.Tensor) -> torch.Tensor:
        """[T] mean log c of each token's rollout."""
        return (self.mismatch / self.num_tokens.clamp(min=1))[rollout]


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """Options that every loss takes: weights w(c), sequence gates, KL and entropy. Off by default.

    Weights and gates multiply the policy term only and carry no gradient.
    """

    tis_cap: float | None = None
    """Truncated importance sampling: w = min(c, cap), about 2. Decoupled mode only."""
    icepop_low: float | None = None
    icepop_high: float | None = None
    """IcePop: w = c inside [low, high], else 0; such as 0.5 and 5. Decoupled mode only."""
    geometric_low: float | None = None
    geometric_high: float | None = None
    """Keep a rollout only if exp(mean log c) lies in [low, high], such as 0.99 and 1.01. Decoupled mode only."""
    sequence_mask_delta: float | None = None
    """Remove rollouts with a negative advantage and mean log(mu / pi_theta) above delta; positive ones stay."""
    kl_coef: float = 0.0
    """Times the unbiased KL(pi_theta || pi_r); needs reference log-probabilities."""
    entropy_coef: float = 0.0
    """Times the entropy, as a bonus; needs an entropy with its graph."""

    def __post_init__(self) -> None:
        for name in ("icepop", "geometric"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if (low is None) != (high is None) or (low is not None and not 0 < low < high):
                raise UserError(f"{name}_low and {name}_high: set both with 0 < low < high, got {low} and {high}")
        if self.tis_cap is not None and not self.tis_cap > 0:
            raise UserError(f"tis_cap must be > 0, got {self.tis_cap}")
        if self.tis_cap is not None and self.icepop_low is not None:
            raise UserError("tis_cap and icepop_low/high are two answers to one question: set one of them")

    @property
    def needs_proximal(self) -> bool:
        """In bypass mode c is 1 everywhere and these would silently do nothing."""
        return any(v is not None for v in (self.tis_cap, self.icepop_low, self.geometric_low))

    @property
    def needs_statistics(self) -> bool:
        return self.geometric_low is not None or self.sequence_mask_delta is not None


def safe_exp(log_ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(log_ratio) and where it cannot be had: not finite, or beyond what the dtype holds.

    Such tokens get ratio 1 without gradient, so that nothing else turns NaN; the caller must not train on the step.
    """
    is_bad = ~log_ratio.isfinite() | (log_ratio > math.log(torch.finfo(log_ratio.dtype).max))
    return torch.where(is_bad, torch.zeros_like(log_ratio), log_ratio).exp(), is_bad


def importance_weight(log_c: torch.Tensor, corrections: Corrections) -> torch.Tensor:
    """[T] w(c). Compared as logarithms, so that c itself never overflows."""
    if corrections.tis_cap is not None:
        return log_c.clamp(max=math.log(corrections.tis_cap)).exp()
    if corrections.icepop_low is not None and corrections.icepop_high is not None:
        is_in = within(log_c, corrections.icepop_low, corrections.icepop_high)
        return torch.where(is_in, log_c, torch.zeros_like(log_c)).exp() * is_in
    return torch.ones_like(log_c)


def within(log_values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """low <= exp(log_values) <= high."""
    return (log_values >= math.log(low)) & (log_values <= math.log(high))


def sequence_gate(tokens: LossInputs, statistics: RolloutStatistics | None, corrections: Corrections) -> torch.Tensor:
    """[T] 1 where the token's rollout may be trained, 0 where a sequence-level rule removes it."""
    gate = torch.ones_like(tokens.advantages)
    if statistics is None or not corrections.needs_statistics:
        return gate
    mismatch = statistics.mean_mismatch(tokens.rollout)
    if corrections.geometric_low is not None and corrections.geometric_high is not None:
        gate = gate * within(mismatch, corrections.geometric_low, corrections.geometric_high)
    if corrections.sequence_mask_delta is not None:
        moved_away = -(mismatch + statistics.mean_drift(tokens.rollout))  # mean log(mu / pi_theta)
        gate = gate * ~((tokens.advantages < 0) & (moved_away > corrections.sequence_mask_delta))
    return gate


def unbiased_kl(
    logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, reference_logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] (pi_theta / mu)(u - log u - 1), u = pi_r / pi_theta, and where it overflows.

    The ratio is differentiated too: the expectation under mu is KL(pi_theta || pi_r) and its gradient the exact one
    (DeepSeek-V3.2, 3.1). Without the ratio the gradient would be that of another divergence.
    """
    ratio, is_bad = safe_exp(logprobs - behaviour_logprobs)
    log_u = reference_logprobs - logprobs
    u, is_bad_u = safe_exp(log_u)
    is_bad = is_bad | is_bad_u
    return torch.where(is_bad, torch.zeros_like(ratio), ratio * (u - log_u - 1)), is_bad
