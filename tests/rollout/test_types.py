"""What flows: identities by position, one outcome, and a tree of contexts in which a sampled token counts once."""

import pytest

from burnish.rollout.token_log import TokenLog
from burnish.rollout.types import Context, Group, Slot, StopReason, Trajectory
from burnish.verifiers.types import Outcome, Verdict


def slot(**changes) -> Slot:
    return Slot(**{"task_id": "t", "group_index": 12, "member": 3, "pass_index": 1, **changes})


def cancelled(at: Slot, **more) -> Trajectory:
    return Trajectory(
        slot=at, attempt_id=at.attempt_id(0), outcome=Outcome.cancelled, stop_reason=StopReason.cancelled, **more
    )


def test_ids_say_the_position_and_are_safe_names():
    assert slot().slot_id == "001-000012-003"
    assert slot().attempt_id(2) == "001-000012-003-02"
    assert slot(task_id="u").slot_id == slot().slot_id  # content is no part of it
    with pytest.raises(ValueError, match="must be >= 0"):
        slot(member=-1)


def test_a_fork_trains_each_sampled_token_once(tmp_path):
    """Fork after turn 1 into three branches: the parent's tokens are input there, and lie in the parent's block only."""
    at = slot()
    with TokenLog(tmp_path, at.attempt_id(0)) as log:
        log.open_turn(context_id="0", turn=0, start=0, input_ids=[1, 2])
        log.append_sampled([5] * 4, [-1.0] * 4, [-1.0] * 4, [0] * 4)
        log.seal_turn()
        for branch in range(3):
            log.open_turn(context_id=f"0.{branch}", turn=1, start=6, input_ids=[7])
            log.append_sampled([8] * (branch + 1), [-1.0] * (branch + 1), [-1.0] * (branch + 1), [0] * (branch + 1))
            log.seal_turn()
    contexts = (Context(context_id="0"), *(
        Context(context_id=f"0.{b}", parent="0", parent_len=6, reason="sub_agent") for b in range(3)))  # fmt: skip
    tree = cancelled(at, blocks=tuple(log.refs), contexts=contexts)
    assert tree.num_sampled == 4 + 1 + 2 + 3
    assert Trajectory.from_dict(tree.to_dict()) == tree


def test_a_group_is_one_task_and_one_effort():
    members = [cancelled(slot(member=m)) for m in range(2)]
    assert Group.of(members).rewards == []
    with pytest.raises(ValueError, match="belong to another group"):
        Group.of([members[0], cancelled(slot(group_index=13))])
    with pytest.raises(ValueError, match="one task and one effort"):
        Group.of([members[0], cancelled(slot(member=1, effort="low"))])
    with pytest.raises(ValueError, match="two trajectories of one slot"):
        Group.of([members[0], members[0]])


def test_blocks_of_another_attempt_are_refused(tmp_path):
    with TokenLog(tmp_path, "other") as log:
        log.open_turn(context_id="0", turn=0, start=0, input_ids=[1])
        ref = log.seal_turn()
    with pytest.raises(ValueError, match=r"blocks \[0\] belong to another attempt"):
        cancelled(slot(), blocks=(ref,))


def test_a_verdict_stands_where_one_is_due_and_nowhere_else():
    verdict = Verdict(reward=0.0, rewards={}, tests_run=1, tests_passed=0, log="", duration_s=0.0, artifacts_hash="")

    def made(outcome, **more) -> Trajectory:
        return Trajectory(
            slot=slot(), attempt_id=slot().attempt_id(0), outcome=outcome, stop_reason=StopReason.exit, **more
        )

    assert made(Outcome.finished, is_graded=False).is_usable
    assert not made(Outcome.infra_failed, is_graded=False).is_usable
    with pytest.raises(ValueError, match="outcome finished carries a reward, got no verdict"):
        made(Outcome.finished)
    with pytest.raises(ValueError, match="an ungraded attempt may not carry a verdict"):
        made(Outcome.finished, is_graded=False, verdict=verdict)
    with pytest.raises(ValueError, match="outcome infra_failed may not carry a verdict"):
        made(Outcome.infra_failed, verdict=verdict)
