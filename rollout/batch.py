"""From completed groups to what an optimizer step is asked for: rewards, advantages, who is dropped and why.

A pure function of its inputs; the ledger, the trainer and the metrics read its result. A slot of the batch ends in
exactly one of `uses` and `drops`.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from burnish.rollout.advantage import RolloutScores, is_constant, load_advantage
from burnish.rollout.agents import sampling_seed
from burnish.rollout.blocks import read_block
from burnish.rollout.config import AlgoConfig, RlRun
from burnish.rollout.ledger import Use
from burnish.rollout.types import BlockRef, DropReason, Group, Trajectory

AdvantageOf = Callable[[RolloutScores], list[float]]
FormBatch = Callable[[Sequence[Group], int, Mapping[str, int]], "Batch"]
"""(complete groups, version that will be trained, shared versions by slot) -> what is made of them."""


@dataclass(frozen=True, kw_only=True)
class RolloutItem:
    """One rollout of a batch, whatever is made of it."""

    blocks: tuple[BlockRef, ...]
    oldest_version: int = 0
    """Tokens of an older version are masked."""
    shared_version: int | None = None
    """Of a rollout that a killed driver left: the newest policy version that its lineage and this one have in common. Later
    versions it names were other weights under the same number: their tokens are as old as that. None: played in this
    lineage."""

    @property
    def is_too_old(self) -> bool:
        """Whatever versions its tokens name, none of its weights is young enough."""
        return self.shared_version is not None and self.shared_version < self.oldest_version


@dataclass(frozen=True, kw_only=True)
class TrainItem(RolloutItem):
    """One rollout of a batch of RL."""

    advantage: float


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one request to train did."""

    metrics: dict[str, float]
    is_skipped: bool
    """The loss or a gradient was not finite: nothing changed."""
    version: int
    """Policy version after it."""
    trained_tokens: tuple[int, ...]
    """Of each item; 0 where every token was masked."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One optimizer step before it is taken."""

    items: tuple[RolloutItem, ...]
    uses: tuple[Use, ...]
    """One an item, in the same order."""
    drops: Mapping[DropReason, tuple[str, ...]]
    """Reason -> slots."""
    metrics: Mapping[str, float]


def former_of(run: RlRun, blocks: Path) -> FormBatch:
    """RL's way from groups to a step, with this run's estimator.

    Raises:
        UserError: no such advantage.
    """
    advantage_of = load_advantage(run.algo.advantage, run.algo.advantage_options)

    def form(groups: Sequence[Group], policy_version: int, shared_versions: Mapping[str, int]) -> Batch:
        seed = sampling_seed(run.seed, f"step {policy_version + 1} {groups[0].group_id}")
        return form_batch(groups, policy_version, run.algo, advantage_of, blocks, seed, shared_versions)

    return form


def form_batch(
    groups: Sequence[Group],
    policy_version: int,
    algo: AlgoConfig,
    advantage_of: AdvantageOf,
    blocks: Path,
    seed: int,
    shared_versions: Mapping[str, int],
) -> Batch:
    """Decides every member of these groups.

    Args:
        groups: their members all carry a reward.
        policy_version: the version that will be trained.
        advantage_of: see rollout/advantage.py.
        blocks: folder of the token logs.
        seed: of the permutation, with algo.permute_rewards.
        shared_versions: of slots that a killed driver played, see TrainItem.shared_version.
    """
    members = [trajectory for group in groups for trajectory in group.members]
    rewards = {trajectory.slot.slot_id: trajectory.reward for trajectory in members}
    if algo.permute_rewards:
        rewards = permuted(rewards, seed)
    oldest = policy_version - algo.max_offpolicy_steps
    drops: dict[DropReason, tuple[str, ...]] = {}
    kept: list[Trajectory] = []
    for group in groups:
        reason = drop_reason([rewards[t.slot.slot_id] for t in group.members], algo.keep_constant_groups)
        if reason is None:
            kept += group.members
        else:
            drops[reason] = (*drops.get(reason, ()), *(t.slot.slot_id for t in group.members))
    shared = [shared_versions.get(trajectory.slot.slot_id) for trajectory in kept]
    tokens = [
        trainable_tokens(trajectory, oldest, blocks, version) for trajectory, version in zip(kept, shared, strict=True)
    ]
    if kept and not any(tokens):
        # a step needs a token; one that is too old now will never be younger
        drops[DropReason.stale] = tuple(trajectory.slot.slot_id for trajectory in kept)
        kept, tokens, shared = [], [], []
    advantages = advantage_of(
        RolloutScores(
            rewards=[rewards[t.slot.slot_id] for t in kept],
            group_ids=[t.slot.group_id for t in kept],
            valid=[count > 0 for count in tokens],
            num_tokens=tokens,
        )
    )
    items = tuple(
        TrainItem(blocks=trajectory.blocks, advantage=advantage, oldest_version=oldest, shared_version=version)
        for trajectory, advantage, version in zip(kept, advantages, shared, strict=True)
    )
    uses = tuple(
        Use(slot_id=trajectory.slot.slot_id, weight=advantage, num_tokens=count)
        for trajectory, advantage, count in zip(kept, advantages, tokens, strict=True)
    )
    return Batch(items=items, uses=uses, drops=drops, metrics=batch_metrics(members, kept, tokens, drops))


def permuted(rewards: Mapping[str, float], seed: int) -> dict[str, float]:
    """The same rewards on other rollouts: what is left of any gain is not learning from the reward."""
    values = list(rewards.values())
    random.Random(seed).shuffle(values)
    return dict(zip(rewards, values, strict=True))


def drop_reason(rewards: Sequence[float], is_constant_kept: bool) -> DropReason | None:
    """Why a group says nothing, if so. Decided by the declared reward, before anything shapes it."""
    if len(rewards) < 2:
        return DropReason.too_few_members
    return DropReason.zero_variance if is_constant(rewards) and not is_constant_kept else None


def trainable_tokens(
    trajectory: Trajectory, oldest_version: int, blocks: Path, shared_version: int | None = None
) -> int:
    """Sampled tokens young enough; the blocks are read only where some might not be."""
    if shared_version is not None and shared_version < oldest_version:
        return 0
    if trajectory.version_start >= oldest_version:
        return trajectory.num_sampled
    return sum(
        int((block.sampled_T & (block.version_T >= oldest_version)).sum())
        for block in (read_block(blocks, ref) for ref in trajectory.blocks)
    )


def batch_metrics(
    members: Sequence[Trajectory],
    kept: Sequence[Trajectory],
    tokens: Sequence[int],
    drops: Mapping[DropReason, tuple[str, ...]],
) -> dict[str, float]:
    """Numbers of the rollouts that were consumed; each rollout weighs the same, however many turns it has."""
    count = len(members)
    sampled = sum(trajectory.num_sampled for trajectory in kept)
    metrics = {
        "rollout/turns": sum(len(t.turns) for t in members) / count,
        "rollout/sampled_tokens": sum(t.num_sampled for t in members) / count,
        "rollout/wall_s": sum(t.wall_s for t in members) / count,
        "rollout/consumed": float(count),
        "rollout/trained": float(sum(n > 0 for n in tokens)),
        "rollout/stale_token_share": 1 - sum(tokens) / sampled if sampled else 0.0,
    }
    if graded := [trajectory.reward for trajectory in members if trajectory.has_reward]:
        metrics["rollout/reward"] = sum(graded) / len(graded)
    verdicts = [t.verdict for t in members if t.verdict is not None]
    if verdicts:
        metrics["rollout/reused_verdict_share"] = sum(verdict.is_reused for verdict in verdicts) / len(verdicts)
    metrics["rollout/zero_variance_share"] = len(drops.get(DropReason.zero_variance, ())) / count
    for reason in DropReason:
        if reason in drops:
            metrics[f"rollout/dropped/{reason}"] = float(len(drops[reason]))
    for stop in sorted({t.stop_reason for t in members}):
        metrics[f"rollout/stop/{stop}"] = sum(t.stop_reason == stop for t in members) / count
    for name in ("generate_s", "execute_s", "sandbox_start_s", "grade_s"):
        metrics[f"rollout/{name}"] = sum(t.extras.get(name, 0.0) for t in members) / count
    return metrics
