"""From the student's trajectories to what an optimizer step is asked for: each goes to the teacher of its task's domain.

A pure function of its inputs. Nothing is compared within a group and no reward is needed: whatever has a token that is young
enough is trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from burnish.distill.specialist import Teacher
from burnish.rollout.batch import Batch, RolloutItem, batch_metrics, trainable_tokens
from burnish.rollout.ledger import Use
from burnish.rollout.types import DropReason, Group


@dataclass(frozen=True, kw_only=True)
class DistillItem(RolloutItem):
    """One rollout of a batch."""

    teacher: str
    """Name of the teacher that it is compared with."""


def form_batch(
    groups: Sequence[Group],
    policy_version: int,
    shared_versions: Mapping[str, int],
    *,
    teacher_of: Mapping[str, Teacher],
    max_offpolicy_steps: int,
    blocks: Path,
) -> Batch:
    """Decides every member of these groups.

    Args:
        groups: their members have all ended.
        policy_version: the version that will be trained.
        shared_versions: of slots that a killed driver played, see RolloutItem.shared_version.
        teacher_of: teacher of each task.
        max_offpolicy_steps: largest age of a trained token in policy versions; older ones are masked.
        blocks: folder of the token logs.
    """
    members = [trajectory for group in groups for trajectory in group.members]
    oldest = policy_version - max_offpolicy_steps
    shared = [shared_versions.get(trajectory.slot.slot_id) for trajectory in members]
    tokens = [
        trainable_tokens(trajectory, oldest, blocks, version)
        for trajectory, version in zip(members, shared, strict=True)
    ]
    if not any(tokens):
        # a step needs a token; one that is too old now will never be younger
        drops = {DropReason.stale: tuple(trajectory.slot.slot_id for trajectory in members)}
        return Batch(items=(), uses=(), drops=drops, metrics=batch_metrics(members, [], [], drops))
    teachers = [teacher_of[trajectory.slot.task_id] for trajectory in members]
    items = tuple(
        DistillItem(blocks=trajectory.blocks, teacher=teacher.name, oldest_version=oldest, shared_version=version)
        for trajectory, teacher, version in zip(members, teachers, shared, strict=True)
    )
    uses = tuple(
        Use(slot_id=trajectory.slot.slot_id, weight=teacher.weight, num_tokens=count)
        for trajectory, teacher, count in zip(members, teachers, tokens, strict=True)
    )
    metrics = dict(batch_metrics(members, members, tokens, {}))
    for teacher in teacher_of.values():
        mine = [count for count, other in zip(tokens, teachers, strict=True) if other.name == teacher.name]
        metrics[f"distill/{teacher.name}/slots"] = float(len(mine))
        metrics[f"distill/{teacher.name}/tokens"] = float(sum(mine))
    return Batch(items=items, uses=uses, drops={}, metrics=metrics)
