"""The sample ledger: every slot once, one outcome an attempt, and the lineage of the checkpoint that is loaded."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from burnish.rollout.ledger import Ledger, Use
from burnish.rollout.ledger_schema import SCHEMA, LedgerError
from burnish.rollout.ledger_view import LedgerView
from burnish.rollout.types import BlockRef, Disposition, DropReason, Slot, StopReason, Trajectory
from burnish.verifiers.types import Outcome, Verdict


def slot(group=0, member=0, **changes) -> Slot:
    return Slot(**{"task_id": f"task-{group}", "group_index": group, "member": member, **changes})


def trajectory(at: Slot, attempt_id: str, reward: float | None = 1.0, outcome=Outcome.finished) -> Trajectory:
    verdict = None if reward is None else Verdict(
        reward=reward, rewards={"reward": reward}, tests_run=1, tests_passed=1, log="", duration_s=0.1, artifacts_hash="a"
    )  # fmt: skip
    block = BlockRef(attempt_id=attempt_id, index=0, context_id="0", turn=0, start=0, num_tokens=5, num_sampled=3,
                     offset=10, size=99, digest="0" * 64)  # fmt: skip
    return Trajectory(
        slot=at, attempt_id=attempt_id, outcome=outcome, stop_reason=StopReason.exit, verdict=verdict, blocks=(block,)
    )


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    yield ledger
    ledger.close()


def make_ready(ledger: Ledger, *slots: Slot) -> list[str]:
    ledger.add_slots(slots)
    for one in slots:
        assert ledger.close_attempt(trajectory(one, ledger.open_attempt(one.slot_id))) is Disposition.ready
    return [one.slot_id for one in slots]


def uses(ids) -> list[Use]:
    return [Use(slot_id=i, weight=0.5, num_tokens=3) for i in ids]


def train(ledger: Ledger, step: int, ids) -> None:
    ledger.begin_step(step, uses(ids))
    ledger.commit_step(step)


def test_life_of_a_slot(ledger):
    one = slot()
    assert ledger.add_slots([one]) == 1
    assert ledger.disposition(one.slot_id) is Disposition.pending
    attempt = ledger.open_attempt(one.slot_id)
    assert ledger.in_flight() == [attempt]
    ledger.close_attempt(trajectory(one, attempt))
    assert [t.attempt_id for t in ledger.ready_trajectories()] == [attempt]
    ledger.begin_step(1, uses([one.slot_id]))
    assert ledger.disposition(one.slot_id) is Disposition.ready  # the optimizer has not taken it yet
    assert ledger.ready_trajectories() == []  # but no second batch can
    ledger.commit_step(1)
    assert ledger.disposition(one.slot_id) is Disposition.trained
    assert (ledger.last_step, ledger.step_slots(1)) == (1, [one.slot_id])
    assert ledger.counts()[Disposition.trained] == 1


def test_a_recorded_trajectory_comes_back_equal(ledger):
    one = slot(effort="high")
    ledger.add_slots([one])
    done = trajectory(one, ledger.open_attempt(one.slot_id), 0.25)
    ledger.close_attempt(done)
    assert ledger.trajectory(done.attempt_id) == done
    assert ledger.slots(Disposition.ready) == [one]


def test_infrastructure_failure_is_never_a_reward(ledger):
    one = slot()
    ledger.add_slots([one])
    for outcome in (Outcome.infra_failed, Outcome.verifier_failed, Outcome.cancelled):
        attempt = ledger.open_attempt(one.slot_id)
        assert ledger.close_attempt(trajectory(one, attempt, None, outcome)) is Disposition.pending
        with pytest.raises(ValueError, match="carries no reward"):
            _ = ledger.trajectory(attempt).reward
    with pytest.raises(ValueError, match="may not carry a verdict"):
        trajectory(one, "x", 0.0, Outcome.infra_failed)
    with pytest.raises(ValueError, match="got no verdict"):
        trajectory(one, "x", None, Outcome.finished)
    assert (ledger.num_attempts(one.slot_id), ledger.num_failed_attempts(one.slot_id)) == (3, 2)
    assert ledger.open_attempt(one.slot_id) == one.attempt_id(3)


def test_every_call_may_be_repeated(ledger):
    one, two = slot(), slot(member=1)
    assert (ledger.add_slots([one, two]), ledger.add_slots([one, two])) == (2, 0)
    attempt = ledger.open_attempt(one.slot_id)
    assert ledger.open_attempt(one.slot_id) == attempt
    done = trajectory(one, attempt)
    assert [ledger.close_attempt(done) for _ in range(2)] == [Disposition.ready] * 2
    for _ in range(2):
        ledger.begin_step(1, uses([one.slot_id]))
    for _ in range(2):
        ledger.commit_step(1)
    ledger.begin_step(1, uses([one.slot_id]))
    assert ledger.close_attempt(done) is Disposition.trained
    for _ in range(2):
        ledger.drop([two.slot_id], DropReason.user_stop)
    assert ledger.drop_reasons() == {"user_stop": 1}
    assert ledger.num_attempts(one.slot_id) == 1


def test_an_attempt_has_exactly_one_outcome(ledger):
    one = slot()
    ledger.add_slots([one])
    attempt = ledger.open_attempt(one.slot_id)
    ledger.close_attempt(trajectory(one, attempt, 1.0))
    with pytest.raises(LedgerError, match="already ended as finished"):
        ledger.close_attempt(trajectory(one, attempt, 0.0))
    with pytest.raises(LedgerError, match="never opened"):
        ledger.close_attempt(trajectory(one, "000-000000-000-07"))


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE attempts SET outcome = 'cancelled', reward = NULL",
        "DELETE FROM attempts",
        "DELETE FROM slots",
        "UPDATE blocks SET digest = digest",
        "UPDATE slots SET disposition = 'trained', step = NULL",
        "UPDATE slots SET disposition = 'dropped'",
        "UPDATE slots SET disposition = 'lost'",
        "INSERT INTO blocks VALUES ('nobody', 0, '0', 0, 0, 1, 1, 0, 1, hex(zeroblob(32)))",
        "INSERT INTO attempts (attempt_id, slot_id, number, opened_at) VALUES ('x', 'nobody', 0, 0)",
        "INSERT INTO attempts (attempt_id, slot_id, number, outcome, stop_reason, reward, opened_at, closed_at)"
        " SELECT 'x', slot_id, 9, 'infra_failed', 'cancelled', 0.0, 0, 0 FROM slots",
        "INSERT INTO uses SELECT slot_id, attempt_id, 1, 'trained', 1.0, 3 FROM slots",
        "INSERT INTO steps VALUES (2, 'open', 0, NULL), (3, 'open', 0, NULL)",
    ],
)
def test_the_database_itself_refuses(ledger, sql):
    train(ledger, 1, make_ready(ledger, slot()))
    with pytest.raises(sqlite3.IntegrityError):
        ledger.rows(sql)


def test_a_slot_is_trained_once(ledger):
    ids = make_ready(ledger, slot(), slot(member=1))
    train(ledger, 1, ids[:1])
    with pytest.raises(LedgerError, match="is trained, expected ready"):
        ledger.begin_step(2, uses(ids))
    assert ledger.step_slots(2) == []  # nothing of the refused step stays
    with pytest.raises(LedgerError, match="each once"):
        ledger.begin_step(2, uses([ids[1], ids[1]]))
    with pytest.raises(LedgerError, match="is trained, expected pending or ready"):
        ledger.drop(ids[:1], DropReason.stale)
    with pytest.raises(LedgerError, match="is trained, expected pending"):
        ledger.open_attempt(ids[0])


def test_steps_come_one_after_another(ledger):
    ids = make_ready(ledger, slot(), slot(member=1), slot(member=2))
    with pytest.raises(LedgerError, match="step 2 cannot begin: the last step is 0"):
        ledger.begin_step(2, uses(ids[:1]))
    ledger.begin_step(1, uses(ids[:1]))
    with pytest.raises(LedgerError, match="step 2 cannot begin"):
        ledger.begin_step(2, uses(ids[1:]))
    with pytest.raises(LedgerError, match="with other slots"):
        ledger.begin_step(1, uses(ids[1:]))
    with pytest.raises(LedgerError, match="in the open optimizer step"):
        ledger.drop(ids[:1], DropReason.stale)
    ledger.abort_step(1)  # an overflow: the step is skipped, the slots stay
    assert len(ledger.ready_trajectories()) == 3
    train(ledger, 1, ids[:1])
    with pytest.raises(LedgerError, match="never begun"):
        ledger.commit_step(2)
    with pytest.raises(LedgerError, match="only 1 steps are committed"):
        ledger.record_checkpoint(2, "checkpoints/2")


def test_masked_slots_are_consumed_but_not_trained(ledger):
    ids = make_ready(ledger, slot(), slot(member=1))
    ledger.begin_step(1, [Use(slot_id=ids[0], weight=1.0, num_tokens=3), Use(slot_id=ids[1], weight=0.0, num_tokens=0)])
    ledger.commit_step(1)
    assert [ledger.disposition(i).value for i in ids] == ["trained", "masked"]


def test_loading_a_checkpoint_undoes_what_was_decided_after_it(ledger):
    slots = [slot(group) for group in range(6)]
    ids = make_ready(ledger, *slots)
    train(ledger, 1, [ids[0]])
    ledger.drop([ids[1]], DropReason.zero_variance, step=1)
    ledger.record_checkpoint(1, "checkpoints/1")
    train(ledger, 2, [ids[2]])
    ledger.drop([ids[3]], DropReason.stale, step=2)
    ledger.begin_step(3, uses([ids[4]]))  # killed here
    late = slot(9)
    ledger.add_slots([late])
    flying = ledger.open_attempt(late.slot_id)
    stored = ledger.trajectory(slots[2].attempt_id(0))

    restored = ledger.load_checkpoint(1)
    assert restored.returned == (ids[2], ids[3])
    assert restored.abandoned == (flying,)
    assert [ledger.disposition(i).value for i in ids] == ["trained", "dropped", "ready", "ready", "ready", "ready"]
    assert ledger.disposition(late.slot_id) is Disposition.pending
    assert stored in ledger.ready_trajectories()  # with its blocks
    assert ledger.last_step == 1
    assert ledger.load_checkpoint(1).returned == ()  # again: nothing left to undo
    train(ledger, 2, [ids[2], ids[3], ids[4], ids[5]])
    assert ledger.counts()[Disposition.trained] == 5
    with pytest.raises(LedgerError, match="already ended as cancelled"):
        ledger.close_attempt(trajectory(late, flying))  # a late answer of the abandoned attempt
    assert ledger.open_attempt(late.slot_id) == late.attempt_id(1)


def test_a_drop_without_an_attempt_goes_back_to_pending(ledger):
    ledger.add_slots([slot()])
    ledger.drop([slot().slot_id], DropReason.too_many_attempts, step=1)
    ledger.load_checkpoint(0)
    assert ledger.disposition(slot().slot_id) is Disposition.pending


def test_a_checkpoint_ahead_of_the_ledger_is_refused(ledger):
    with pytest.raises(LedgerError, match="checkpoint 1 is ahead of the ledger, which holds 0"):
        ledger.load_checkpoint(1)


def test_dropping_cancels_what_is_in_flight(ledger):
    ledger.add_slots([slot()])
    attempt = ledger.open_attempt(slot().slot_id)
    ledger.drop([slot().slot_id], "quarantined")
    assert ledger.in_flight() == []
    assert ledger.rows("SELECT outcome FROM attempts")[0][0] == "cancelled"
    with pytest.raises(LedgerError, match="already ended"):
        ledger.close_attempt(trajectory(slot(), attempt))


def test_groups_are_positions_not_contents(ledger):
    # same task twice in a pass is two groups; one group never has two tasks or efforts
    ledger.add_slots([slot(0, task_id="a"), slot(1, task_id="a"), slot(1, 1, task_id="a")])
    assert len({s.group_id for s in ledger.slots()}) == 2
    with pytest.raises(LedgerError, match="is task a at effort none"):
        ledger.add_slots([slot(1, 2, task_id="b")])
    with pytest.raises(LedgerError, match=r"slot .* says a at low"):
        ledger.add_slots([slot(1, 2, task_id="a", effort="low")])
    assert len(ledger.slots()) == 3


def test_one_writer(tmp_path, ledger):
    with pytest.raises(LedgerError, match=f"is being written by process {os.getpid()}"):
        Ledger(ledger.path)
    began = time.monotonic()
    with pytest.raises(LedgerError):
        Ledger(ledger.path, wait_s=0.3)
    assert time.monotonic() - began >= 0.3
    view = LedgerView.open(ledger.path)  # readers are welcome
    ledger.add_slots([slot()])
    assert len(view.slots()) == 1
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        view.rows("DELETE FROM events")
    view.close()


def test_a_snapshot_is_whole_and_reads_in_a_read_only_folder(tmp_path, ledger):
    ids = make_ready(ledger, slot(), slot(member=1))
    train(ledger, 1, ids[:1])
    folder = tmp_path / "run"
    folder.mkdir()
    ledger.snapshot(folder / "ledger.sqlite")
    train(ledger, 2, ids[1:])
    view = LedgerView.open(folder / "ledger.sqlite")
    assert view.last_step == 1
    view.close()
    assert [p.name for p in folder.iterdir()] == ["ledger.sqlite"]


@pytest.mark.parametrize(
    ("version", "message"),
    [(0, "is not a ledger"), (99, "has schema version 99, this version of burnish reads up to 3")],
)
def test_other_schema_versions_are_refused(tmp_path, version, message):
    path = tmp_path / "ledger.sqlite"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE something (x)")
    db.execute(f"PRAGMA user_version = {version}")
    db.close()
    for opening in (Ledger, LedgerView.open):
        with pytest.raises(LedgerError, match=message):
            opening(path)
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(LedgerError, match="cannot open the ledger"):
        Ledger(path)
    with pytest.raises(FileNotFoundError):
        LedgerView.open(tmp_path / "none.sqlite")


WORKLOAD = """
import random, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_ledger import Ledger, Use, slot, trajectory, uses
from burnish.rollout.types import Disposition
run = Path({run!r})
ledger = Ledger(run / "ledger.sqlite", wait_s=10)
marker = run / "checkpoint"
step = int(marker.read_text()) if marker.exists() else 0
ledger.load_checkpoint(step)
rng = random.Random(step)
print("up", flush=True)
while step < 30:
    ledger.add_slots(slot(step, m) for m in range(4))
    for one in ledger.slots(Disposition.pending):
        ledger.close_attempt(trajectory(one, ledger.open_attempt(one.slot_id)))
    ready = ledger.ready_trajectories()
    step += 1
    ledger.begin_step(step, uses([t.slot.slot_id for t in ready[:4]]))
    ledger.commit_step(step)
    if rng.random() < 0.3 or step == 30:
        temporary = run / "checkpoint.tmp"
        temporary.write_text(str(step))
        temporary.replace(marker)
        ledger.record_checkpoint(step, "checkpoint")
"""


def test_kill_9_anywhere_trains_every_slot_exactly_once(tmp_path):
    code = WORKLOAD.format(tests=str(Path(__file__).parent), run=str(tmp_path))
    rng = random.Random(3)
    kills = 0
    for _ in range(40):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        try:
            # short lives: on a quiet machine all thirty steps take little more than a tenth of a second
            process.wait(rng.uniform(0.003, 0.03) if kills < 6 else 60)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.stdout.close()
        if process.wait() == 0:
            break
    assert kills >= 3
    view = LedgerView.open(tmp_path / "ledger.sqlite")
    counts = view.counts()
    trained = [i for step in range(1, 31) for i in view.step_slots(step)]
    assert len(trained) == len(set(trained)) == counts[Disposition.trained] == 120
    assert sum(counts.values()) == 120
    assert view.rows("PRAGMA integrity_check")[0][0] == "ok"
    assert not view.rows("PRAGMA foreign_key_check")
    view.close()


def test_an_ungraded_attempt_can_be_used_and_has_no_reward(ledger):
    one, other = slot(0), slot(1)
    ledger.add_slots([one, other])
    attempts = [ledger.open_attempt(s.slot_id) for s in (one, other)]
    ungraded = replace(trajectory(one, attempts[0], reward=None, outcome=Outcome.cancelled), is_graded=False)
    ungraded = replace(ungraded, outcome=Outcome.finished)
    assert ledger.close_attempt(ungraded) is Disposition.ready
    assert ledger.close_attempt(ungraded) is Disposition.ready, "again: nothing happens"
    assert ledger.rows("SELECT reward, is_graded FROM attempts WHERE attempt_id = ?", attempts[0])[0][:] == (None, 0)
    with pytest.raises(ValueError, match="carries no reward"):
        _ = ledger.trajectory(attempts[0]).reward
    failed = replace(trajectory(other, attempts[1], None, Outcome.infra_failed), is_graded=False)
    assert ledger.close_attempt(failed) is Disposition.pending
    train(ledger, 1, [one.slot_id])
    # a graded attempt without its reward, and an ungraded one with a reward, are refused by the database itself
    for reward, is_graded in (("NULL", 1), ("0.0", 0)):
        with pytest.raises(sqlite3.IntegrityError):
            ledger._db.execute(
                "INSERT INTO attempts (attempt_id, slot_id, number, outcome, stop_reason, reward, is_graded, opened_at, "
                f"closed_at) SELECT 'x', slot_id, 9, 'finished', 'exit', {reward}, {is_graded}, 0, 0 FROM slots LIMIT 1"
            )


def test_a_ledger_of_version_2_is_upgraded_with_everything_in_it(tmp_path):
    path = tmp_path / "ledger.sqlite"
    old = SCHEMA.replace("  is_graded INTEGER NOT NULL DEFAULT 1 CHECK (is_graded IN (0, 1)),\n", "")
    old = old.replace("is_graded = 1 AND ", "")
    assert "is_graded" not in old
    db = sqlite3.connect(path)
    db.executescript(old)
    db.executescript("""PRAGMA user_version = 2;
        INSERT INTO slots (slot_id, task_id, effort, group_id, group_index, member, pass_index)
          VALUES ('000-000000-000', 'task-0', 'none', '000-000000', 0, 0, 0);
        INSERT INTO attempts VALUES ('000-000000-000-00', '000-000000-000', 0, 'finished', 'exit', 1.0, NULL, 1, 2);
        UPDATE slots SET disposition = 'ready', attempt_id = '000-000000-000-00';""")
    db.close()
    with pytest.raises(LedgerError, match="open it once for writing"):
        LedgerView.open(path)
    ledger = Ledger(path)
    try:
        assert ledger.rows("PRAGMA user_version")[0][0] == 3
        assert ledger.rows("PRAGMA foreign_keys")[0][0] == 1
        assert ledger.rows("PRAGMA foreign_key_check") == []
        assert ledger.rows("SELECT reward, is_graded FROM attempts")[0][:] == (1.0, 1)
        train(ledger, 1, ["000-000000-000"])
        with pytest.raises(sqlite3.IntegrityError, match="exactly one outcome"):
            ledger._db.execute("UPDATE attempts SET outcome = 'cancelled'")
        with pytest.raises(sqlite3.IntegrityError, match="never deleted"):
            ledger._db.execute("DELETE FROM attempts")
    finally:
        ledger.close()
