"""The order of slots: every stretch has the mixture, every task comes, and a resumed run sees the same order."""

from collections import Counter

import pytest

from burnish.distill.mixture import Domain, slots_of_pass


def order(pass_index=0, seed=0, group_size=1, **domains):
    made = {
        name: Domain(task_ids=[f"{name}-{i:03d}" for i in range(n)], share=share)
        for name, (n, share) in domains.items()
    }
    return slots_of_pass(made, pass_index, group_size, "none", seed)


@pytest.mark.parametrize("start", [0, 7, 30])
def test_every_stretch_has_the_mixture(start):
    names = [slot.task_id.split("-")[0] for slot in order(coding=(40, 1.0), terminal=(40, 3.0))]
    counts = Counter(names[start : start + 40])
    assert counts == {"coding": 10, "terminal": 30}


def test_every_task_comes_and_a_small_domain_comes_again():
    slots = order(coding=(5, 1.0), terminal=(12, 1.0))
    counts = Counter(slot.task_id for slot in slots)
    assert {counts[f"terminal-{i:03d}"] for i in range(12)} == {1}
    assert {counts[f"coding-{i:03d}"] for i in range(5)} <= {2, 3}
    assert [slot.group_index for slot in slots] == list(range(len(slots)))


def test_the_order_is_a_function_of_seed_and_pass():
    of = {"coding": (9, 1.0), "terminal": (9, 1.0)}
    assert order(**of) == order(**of)
    tasks = [[slot.task_id for slot in order(seed=s, pass_index=p, **of)] for s, p in ((0, 0), (1, 0), (0, 1))]
    assert len({tuple(t) for t in tasks}) == 3


def test_members_of_a_group_play_one_task():
    slots = order(group_size=3, coding=(4, 1.0))
    assert len(slots) == 12
    for first in range(0, 12, 3):
        assert len({slot.task_id for slot in slots[first : first + 3]}) == 1
        assert [slot.member for slot in slots[first : first + 3]] == [0, 1, 2]
