"""Policy losses by name or import path, each a pure function from trained tokens to a loss a token.

A loss function never sees padding, never sums and never divides: `Loss` selects the trained tokens, applies weights, gates,
KL and entropy (loss_terms.py), multiplies by the normaliser's token weights and returns ONE SUM. Whoever steps divides it
once by the normaliser's denominator. So no registered loss and no plug-in can depend on how a batch is cut, packed,
ordered or spread over ranks.

What a token's loss needs of its whole rollout (GSPO's ratio, sequence gates) comes in as RolloutStatistics. Without them
they are taken from the micro-batch, which must then hold its rollouts completely; a rollout that is cut is an error.

Sources: Schulman 2017 (clip), Ye 2020 (dual clip), Yu 2025 (DAPO), Zheng 2025 (GSPO), MiniMax 2025 (CISPO),
arXiv 2602.04879 (DPPO), DeepSeek-V3.2 report (KL, sequence mask).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from burnish.envs.errors import UserError
from burnish.policy.training.step import LossSum
from burnish.rollout.loss_terms import (
    Corrections,
    LossInputs,
    Normaliser,
    RolloutStatistics,
    importance_weight,
    safe_exp,
    sequence_gate,
    unbiased_kl,
    within,
)
from burnish.rollout.plugins import bind, options_of, resolve


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """What a loss function returns, [T] each, T = trained tokens of the micro-batch."""

    loss: torch.Tensor
    """To be minimised, with its graph."""
    is_bad: torch.Tensor
    """bool, tokens whose ratio overflowed or was not finite."""
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further values a token, without graph; logged as `train/<name>`."""


LossFn = Callable[..., TokenLoss]
"""(tokens, statistics, *, options) -> TokenLoss. `statistics` is None unless the function is marked `on_whole_rollouts` or
a correction needs them."""


def on_whole_rollouts(function: LossFn) -> LossFn:
    """Marks a loss whose tokens need sums over their whole rollout, of all micro-batches."""
    vars(function)["needs_statistics"] = True
    return function


def clipped(
    tokens: LossInputs,
    statistics: RolloutStatistics | None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """PPO / GRPO: -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A).

    Args:
        dual_clip: for A < 0 the objective is at least dual_clip x A, about 3; None is off.
    """
    ratio, is_bad = safe_exp(tokens.logprobs - tokens.proximal)
    advantages = tokens.advantages
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    is_clipped = clipped_ratio.detach() * advantages < ratio.detach() * advantages
    if dual_clip is not None:
        if dual_clip <= 1:
            raise UserError(f"dual_clip must be above 1, got {dual_clip}")
        floor = dual_clip * advantages
        is_clipped = is_clipped | ((advantages < 0) & (objective.detach() < floor))
        objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
    return TokenLoss(
        loss=-objective, is_bad=is_bad, metrics={"ratio": ratio.detach(), "clipped_share": is_clipped.to(ratio)}
    )


def dapo(
    tokens: LossInputs, statistics: RolloutStatistics | None, *, clip_low: float = 0.2, clip_high: float = 0.28
) -> TokenLoss:
    """DAPO: the clip is wider upwards, so that unlikely tokens can grow; meant for reduction=token_mean."""
    return clipped(tokens, statistics, clip_low=clip_low, clip_high=clip_high)


@on_whole_rollouts
def gspo(
    tokens: LossInputs, statistics: RolloutStatistics | None, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> TokenLoss:
    """GSPO: one ratio a rollout, s = exp(mean log rho), clipped; meant for reduction=rollout_mean.

    The gradient of token t is s A grad log pi_theta(t), so that the mean over the rollout is the gradient of s A.
    """
    assert statistics is not None, "Loss provides them to what is marked on_whole_rollouts"
    sequence, is_bad = safe_exp(statistics.mean_drift(tokens.rollout).to(tokens.logprobs))
    # value 1, gradient that of log pi_theta
    ratio = sequence * (tokens.logprobs - tokens.logprobs.detach()).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * tokens.advantages, clipped_ratio * tokens.advantages)
    is_clipped = clipped_ratio.detach() * tokens.advantages < ratio.detach() * tokens.advantages
    return TokenLoss(loss=-objective, is_bad=is_bad, metrics={"ratio": sequence, "clipped_share": is_clipped.to(ratio)})


def cispo(tokens: LossInputs, statistics: RolloutStatistics | None, *, clip_high: float = 0.2) -> TokenLoss:
    """CISPO: -sg[min(rho, 1 + clip_high)] A log pi_theta; every token keeps a gradient."""
    ratio, is_bad = safe_exp((tokens.logprobs - tokens.proximal).detach())
    weight = ratio.clamp(max=1 + clip_high)
    logprobs = torch.where(is_bad, torch.zeros_like(tokens.logprobs), tokens.logprobs)
    return TokenLoss(
        loss=-weight * tokens.advantages * logprobs,
        is_bad=is_bad,
        metrics={"ratio": ratio, "clipped_share": (weight < ratio).to(ratio)},
    )


def dppo_tv(
    tokens: LossInputs, statistics: RolloutStatistics | None, *, delta: float = 0.2, tau: float = 1e-3
) -> TokenLoss:
    """DPPO-Binary-TV: -M rho A + tau (log rho)^2.

    M is 0 where the token's probability has already moved more than delta from mu in the direction of A. It acts on
    differences of probabilities: a rare token is not cut for a large ratio with negligible mass.
    """
    log_ratio = tokens.logprobs - tokens.proximal
    ratio, is_bad = safe_exp(log_ratio)
    moved = (tokens.logprobs.detach().exp() - tokens.behaviour_logprobs.exp()) * tokens.advantages.sign()
    keep = (moved <= delta).to(ratio)
    log_ratio = torch.where(is_bad, torch.zeros_like(log_ratio), log_ratio)
    return TokenLoss(
        loss=-keep * ratio * tokens.advantages + tau * log_ratio.square(),
        is_bad=is_bad,
        metrics={"ratio": ratio.detach(), "clipped_share": 1 - keep},
    )


LOSSES: dict[str, LossFn] = {
    "cispo": cispo,
    "clipped": clipped,
    "dapo": dapo,
    "dppo_tv": dppo_tv,
    "grpo": clipped,
    "gspo": gspo,
}


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss function with its options and corrections: micro-batch in, one sum and its metrics out."""

    name: str
    function: LossFn
    """Options fixed."""
    corrections: Corrections
    needs_statistics: bool
    """True when a rollout that is spread over micro-batches needs RolloutStatistics from a pass before."""

    def __call__(
        self, inputs: LossInputs, normaliser: Normaliser, statistics: RolloutStatistics | None = None
    ) -> LossSum:
        """
        Args:
            normaliser: of the whole optimizer step; divide the sum by its denominator, once.
            statistics: of the whole optimizer step; see the module.

        Returns:
            The sum, with its graph. It is NaN when a trained token's ratio overflowed or was not finite, so that the
            step is skipped and counted, never taken with a wrong number; `train/overflow_share` says how many.

        Raises:
            ValueError: something an option needs is missing, or a rollout is cut without statistics.
        """
        self._check(inputs)
        tokens = inputs.trained()
        if self.needs_statistics and statistics is None:
            statistics = self._own_statistics(tokens, normaliser)
        result = self.function(tokens, statistics if self.needs_statistics else None)
        log_c = tokens.proximal - tokens.behaviour_logprobs
        gate = sequence_gate(tokens, statistics, self.corrections)
        weight = importance_weight(log_c, self.corrections)
        loss, is_bad = result.loss * (weight * gate), result.is_bad | ~log_c.isfinite()
        metrics = {
            **result.metrics,
            "advantage": tokens.advantages,
            "mismatch_kl": _mismatch_kl(tokens),
            "gated_share": 1 - gate,
            **_weight_metrics(log_c, weight, self.corrections),
        }
        if self.corrections.kl_coef:
            assert tokens.reference_logprobs is not None
            kl, is_bad_kl = unbiased_kl(tokens.logprobs, tokens.behaviour_logprobs, tokens.reference_logprobs)
            loss, is_bad = loss + self.corrections.kl_coef * kl, is_bad | is_bad_kl
            metrics["reference_kl"] = kl.detach()
        if tokens.entropy is not None:
            metrics["entropy"] = tokens.entropy.detach()
            if self.corrections.entropy_coef:
                loss = loss - self.corrections.entropy_coef * tokens.entropy
        total = (normaliser.token_weights(tokens) * torch.where(is_bad, torch.zeros_like(loss), loss)).sum()
        metrics = {name: torch.where(is_bad, torch.zeros_like(values), values) for name, values in metrics.items()}
        metrics["overflow_share"] = is_bad.to(total)
        sums: dict[str, Any] = {
            f"train/{name}": (values.double().sum(), float(len(tokens))) for name, values in metrics.items()
        }
        return LossSum(loss=torch.where(is_bad.any(), torch.full_like(total, torch.nan), total), metrics=sums)

    def _check(self, inputs: LossInputs) -> None:
        options = self.corrections
        if options.needs_proximal and inputs.proximal_logprobs is None:
            raise UserError(
                f"loss={self.name!r}: tis_cap, icepop and geometric act on pi_p / mu, which is 1 in bypass mode; "
                f"score the batch at the start of the update (proximal log-probabilities) or leave them out"
            )
        if options.kl_coef and inputs.reference_logprobs is None:
            raise UserError(f"loss={self.name!r}: kl_coef={options.kl_coef} needs reference log-probabilities")
        if options.entropy_coef and (
            inputs.entropy is None or (torch.is_grad_enabled() and not inputs.entropy.requires_grad)
        ):
            raise UserError(f"loss={self.name!r}: entropy_coef={options.entropy_coef} needs an entropy with its graph")

    def _own_statistics(self, tokens: LossInputs, normaliser: Normaliser) -> RolloutStatistics:
        own = RolloutStatistics.of(tokens, len(normaliser.rollout_tokens))
        cut = torch.nonzero((own.num_tokens > 0) & (own.num_tokens != normaliser.rollout_tokens.to(own.num_tokens)))
        if len(cut):
            i = int(cut[0])
            raise ValueError(
                f"loss={self.name!r} looks at whole rollouts: rollout {i} has {int(normaliser.rollout_tokens[i])} trained "
                f"tokens, this micro-batch holds {int(own.num_tokens[i])}; pass RolloutStatistics of the whole step"
            )
        return own


def load_loss(spec: str, options: Mapping[str, Any] | None = None) -> Loss:
    """The loss a setting names.

    Args:
        spec: a name in `LOSSES`, or `package.module:function` of type LossFn.
        options: of the loss function (its keyword-only parameters) and of `Corrections`, in one mapping.

    Raises:
        UserError: no such loss or option, or a contradiction.
    """
    function = resolve(spec, LOSSES, "loss")
    shared = {f.name for f in fields(Corrections)}
    own = options_of(function)
    if clash := shared & set(own):
        raise UserError(f"loss={spec!r}: its option {sorted(clash)[0]!r} is the name of a correction every loss has")
    given = dict(options or {})
    unknown = sorted(set(given) - shared - set(own))
    if unknown:
        raise UserError(
            f"loss={spec!r} has no option {unknown[0]!r}: expected {', '.join(sorted(own)) or 'none of its own'}; "
            f"or, for every loss, {', '.join(sorted(shared))}"
        )
    corrections = Corrections(**{k: v for k, v in given.items() if k in shared})
    return Loss(
        name=spec,
        function=bind(function, {k: v for k, v in given.items() if k in own}, "loss", spec),
        corrections=corrections,
        needs_statistics=getattr(function, "needs_statistics", False) or corrections.needs_statistics,
    )


def check_corrections(loss: Loss, *, is_decoupled: bool) -> None:
    """Options of every loss that need what this trainer does not have, told before a rollout is played.

    Raises:
        UserError: which, and what to set.
    """
    options = loss.corrections
    if options.needs_proximal and not is_decoupled:
        raise UserError(
            "algo.loss_options: tis_cap, icepop and geometric weigh by trainer against engine, which is 1 unless "
            "algo.decoupled=true: set it, or leave them out"
        )
    for name in ("kl_coef", "entropy_coef"):
        if getattr(options, name):
            lacks = "no reference policy is scored" if name == "kl_coef" else "the entropy has no gradient"
            raise UserError(
                f"algo.loss_options: {name}={getattr(options, name)} is not offered by burnish rl yet: {lacks}"
            )


def _mismatch_kl(tokens: LossInputs) -> torch.Tensor:
    """[T] r - log r - 1 with r = pi_theta / mu: its mean under mu estimates KL(mu || pi_theta), trainer against engine."""
    log_r = (tokens.logprobs.detach() - tokens.behaviour_logprobs).clamp(max=50)
    return log_r.exp() - log_r - 1


def _weight_metrics(log_c: torch.Tensor, weight: torch.Tensor, corrections: Corrections) -> dict[str, torch.Tensor]:
    """From the raw ratios: computed from clamped ones, the share above the cap could never be anything but 0."""
    if corrections.tis_cap is not None:
        is_cut = log_c > math.log(corrections.tis_cap)
    elif corrections.icepop_low is not None and corrections.icepop_high is not None:
        is_cut = ~within(log_c, corrections.icepop_low, corrections.icepop_high)
    else:
        return {}
    return {"importance_weight": weight, "importance_cut_share": is_cut.to(weight)}
