"""The order of slots over several domains: every stretch of it has the mixture that was asked for.

Knows tasks by name and shares, no teacher and no model.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from burnish.rollout.types import Slot


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The tasks of one teacher."""

    task_ids: Sequence[str]
    share: float
    """Slots, next to the other domains'."""


def slots_of_pass(
    domains: Mapping[str, Domain], pass_index: int, group_size: int, effort: str, seed: int
) -> list[Slot]:
    """Slots of one pass: until every task of every domain came once. A smaller domain starts again meanwhile.

    Each domain's tasks are shuffled by (seed, pass, round), so that a resumed run sees the same order.
    """
    order: list[str] = []
    queues: dict[str, list[str]] = {name: [] for name in domains}
    counts = dict.fromkeys(domains, 0)
    while any(counts[name] < len(domain.task_ids) for name, domain in domains.items()):
        # whoever is furthest behind its share; ties by name
        name = min(domains, key=lambda name: ((counts[name] + 1) / domains[name].share, name))
        if not queues[name]:
            tasks = sorted(domains[name].task_ids)
            random.Random(f"{seed}/{pass_index}/{name}/{counts[name] // len(tasks)}").shuffle(tasks)
            queues[name] = tasks[::-1]
        order.append(queues[name].pop())
        counts[name] += 1
    return [
        Slot(task_id=task_id, effort=effort, group_index=index, member=member, pass_index=pass_index)
        for index, task_id in enumerate(order)
        for member in range(group_size)
    ]
