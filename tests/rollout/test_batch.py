"""From groups to a step: which groups say something, and to which estimator."""

import pytest

from burnish.rollout.advantage import load_advantage
from burnish.rollout.batch import form_batch
from burnish.rollout.config import AlgoConfig
from burnish.rollout.token_log import TokenLog
from burnish.rollout.types import DropReason, Group, Slot, StopReason, Trajectory
from burnish.verifiers.types import Outcome, Verdict


def group(folder, number: int, rewards: list[float]) -> Group:
    """One trajectory of three tokens a reward."""
    members = []
    for member, reward in enumerate(rewards):
        slot = Slot(task_id=f"task-{number}", group_index=number, member=member)
        attempt_id = slot.attempt_id(0)
        with TokenLog(folder, attempt_id) as log:
            log.open_turn(context_id="0", turn=0, start=0, input_ids=[7])
            log.append_sampled([1, 2, 3], [-1.0] * 3, [-1.0] * 3, [0] * 3)
            log.seal_turn()
        verdict = Verdict(
            reward=reward, rewards={}, tests_run=1, tests_passed=1, log="", duration_s=0.1, artifacts_hash="a",
            is_reused=member > 0,
        )  # fmt: skip
        members.append(
            Trajectory(slot=slot, attempt_id=attempt_id, outcome=Outcome.finished, stop_reason=StopReason.exit,
                       verdict=verdict, blocks=tuple(log.refs))
        )  # fmt: skip
    return Group.of(members)


def formed(folder, algo: AlgoConfig, *rewards: list[float]):
    groups = [group(folder, number, values) for number, values in enumerate(rewards)]
    return form_batch(groups, 0, algo, load_advantage(algo.advantage), folder, 0, {})


def test_groups_of_equal_rewards_are_dropped_with_the_reason(tmp_path):
    batch = formed(tmp_path, AlgoConfig(), [1.0, 1.0], [1.0, 0.0], [0.0, 0.0])
    assert [item.advantage for item in batch.items] == [0.5, -0.5]
    assert {reason: len(slots) for reason, slots in batch.drops.items()} == {DropReason.zero_variance: 4}
    assert batch.metrics["rollout/zero_variance_share"] == pytest.approx(4 / 6)
    assert batch.metrics["rollout/reused_verdict_share"] == 0.5


def test_an_estimator_that_compares_across_groups_keeps_them(tmp_path):
    algo = AlgoConfig(advantage="reinforce_pp", keep_constant_groups=True)
    batch = formed(tmp_path, algo, [1.0, 1.0], [1.0, 0.0], [0.0, 0.0])
    assert not batch.drops
    assert [item.advantage for item in batch.items] == pytest.approx([1, 1, 1, -1, -1, -1])
    assert [use.num_tokens for use in batch.uses] == [3] * 6


def test_a_batch_that_says_nothing_at_all_is_no_step_for_either(tmp_path):
    assert not formed(tmp_path / "a", AlgoConfig(), [1.0, 1.0]).items
    algo = AlgoConfig(advantage="reinforce_pp", keep_constant_groups=True)
    assert {item.advantage for item in formed(tmp_path / "b", algo, [1.0, 1.0]).items} == {0.0}
