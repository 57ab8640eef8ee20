"""The audit: clean on a true run, at every instant of it, and loud on every kind of planted violation."""

import json
import random
import re
import shutil
import sqlite3

import pytest

from burnish.envs.errors import UserError
from burnish.policy.training.metrics import MetricLogger, WandbMode
from burnish.rollout.audit import CHECKS, audit, main
from burnish.rollout.blocks import log_path, read_log
from burnish.rollout.config import AuditRun
from burnish.rollout.ledger import Ledger, Use
from burnish.rollout.token_log import TokenLog
from burnish.rollout.types import DropReason, Slot, StopReason, Trajectory
from burnish.verifiers.types import Outcome, Verdict


def play(run, ledger: Ledger, slot: Slot, outcome=Outcome.finished) -> None:
    """One attempt with two turns of real blocks."""
    attempt_id = ledger.open_attempt(slot.slot_id)
    with TokenLog(run / "blocks", attempt_id) as log:
        for turn in range(2):
            log.open_turn(context_id="0", turn=turn, start=5 * turn, input_ids=[7, 8])
            log.append_sampled([1, 2, 3], [-1.0] * 3, [-1.0] * 3, [0] * 3)
            log.seal_turn()
    verdict = None
    if outcome.has_reward:
        verdict = Verdict(
            reward=0.5, rewards={}, tests_run=1, tests_passed=1, log="", duration_s=0.1, artifacts_hash="a"
        )
    ledger.close_attempt(
        Trajectory(slot=slot, attempt_id=attempt_id, outcome=outcome, stop_reason=StopReason.exit, verdict=verdict,
                   blocks=tuple(log.refs))
    )  # fmt: skip


def slots_of(group: int) -> list[Slot]:
    return [Slot(task_id=f"task-{group}", group_index=group, member=m) for m in range(2)]


def checkpoint(run, step: int) -> str:
    folder = run / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"num_steps": step}))
    return f"checkpoints/step-{step}"


@pytest.fixture(scope="module")
def true_run(tmp_path_factory):
    """Groups 0-2 trained in steps 1-3 (one member masked), 3 dropped, 4 ready, 5 pending with a failure and one in flight."""
    run = tmp_path_factory.mktemp("run")
    ledger = Ledger(run / "ledger.sqlite")
    with MetricLogger(run, mode=WandbMode.disabled) as metrics:
        for group in range(5):
            ledger.add_slots(slots_of(group))
            for slot in slots_of(group):
                play(run, ledger, slot)
        for step in (1, 2, 3):
            uses = [
                Use(slot_id=s.slot_id, weight=0.5, num_tokens=0 if step == 2 and s.member == 1 else 3)
                for s in slots_of(step - 1)
            ]
            ledger.begin_step(step, uses)
            ledger.commit_step(step)
            metrics.log({"train/loss": 0.1, "train/slots": 2}, step=step, policy_version=step)
            if step == 2:
                ledger.record_checkpoint(2, checkpoint(run, 2))
    ledger.drop([s.slot_id for s in slots_of(3)], DropReason.zero_variance, step=3)
    ledger.add_slots(slots_of(5))
    play(run, ledger, slots_of(5)[0], Outcome.infra_failed)
    ledger.open_attempt(slots_of(5)[1].slot_id)
    ledger.close()
    return run


@pytest.fixture
def run(true_run, tmp_path):
    return shutil.copytree(true_run, tmp_path / "run")


def damage(run, *statements: str) -> None:
    """Changes the ledger as no program of ours could: without triggers, checks and references."""
    db = sqlite3.connect(run / "ledger.sqlite")
    db.execute("PRAGMA foreign_keys = OFF")
    db.execute("PRAGMA ignore_check_constraints = ON")
    for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        db.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        assert db.execute(statement).rowcount != 0, f"changed nothing: {statement}"
    db.commit()
    db.close()


def test_a_true_run_is_clean(run, capsys):
    report = audit(run)
    assert report.violations == []
    assert report.slots == {"trained": 5, "masked": 1, "dropped (zero_variance)": 2, "ready": 2, "pending": 2}
    assert report.attempts == {"finished": 10, "infra_failed": 1, "in flight": 1}
    assert report.facts == {
        "optimizer steps": 3, "blocks verified": 22, "tokens in blocks": 110, "sampled tokens": 66,
        "checkpoints on disk": 1, "steps in metrics": 3,
    }  # fmt: skip
    assert main(AuditRun(run=str(run))) == 0
    out = capsys.readouterr().out
    for words in (
        "slots trained",
        "slots dropped (zero_variance)",
        "attempts infra_failed",
        "slots in all",
        "violations",
    ):
        assert words in out


def test_it_is_clean_after_the_checkpoint_is_loaded_and_the_work_done_again(run):
    ledger = Ledger(run / "ledger.sqlite")
    restored = ledger.load_checkpoint(2)
    assert len(restored.returned) == 4
    assert len(restored.abandoned) == 1
    assert audit(run).violations == []
    with MetricLogger(run, mode=WandbMode.disabled, resumed_from=2) as metrics:
        ledger.begin_step(3, [Use(slot_id=s.slot_id, weight=1.0, num_tokens=3) for s in slots_of(2)])
        assert audit(run).violations == []  # also in the middle of a step
        ledger.commit_step(3)
        metrics.log({"train/loss": 0.1, "train/slots": 2}, step=3, policy_version=3)
    ledger.record_checkpoint(3, checkpoint(run, 3))
    ledger.close()
    assert audit(run).violations == []


SLOT0, ATTEMPT0 = "000-000000-000", "000-000000-000-00"
LOOSE_USES = (
    "CREATE TABLE loose AS SELECT * FROM uses",
    "DROP TABLE uses",
    "ALTER TABLE loose RENAME TO uses",
)
PLANTED = {
    # what was planted: (statements, check, pattern of the sentence)
    "trained twice": (
        (*LOOSE_USES, f"INSERT INTO uses VALUES ('{SLOT0}', '{ATTEMPT0}', 2, 'trained', 1.0, 3)"),
        "slots", "is trained, but stands in 2 committed optimizer steps"),
    "in two steps": (
        (*LOOSE_USES, f"INSERT INTO uses VALUES ('{SLOT0}', '{ATTEMPT0}', 2, 'trained', 1.0, 3)"),
        "steps", "stands in 2 optimizer steps"),
    "trained but in no step": (
        (f"DELETE FROM uses WHERE slot_id = '{SLOT0}'",), "slots", "is trained, but stands in 0 committed"),
    "trained at another step": (
        (f"UPDATE slots SET step = 2 WHERE slot_id = '{SLOT0}'",), "slots", "trained at step 2 .* step 1 says trained"),
    "trained on another attempt": (
        (f"UPDATE uses SET attempt_id = '000-000004-000-00' WHERE slot_id = '{SLOT0}'",),
        "slots", "with attempt 000-000000-000-00, step 1 says trained with 000-000004-000-00"),
    "ready again though trained": (
        (f"UPDATE slots SET disposition = 'ready', step = NULL WHERE slot_id = '{SLOT0}'",),
        "slots", "is ready, but was in optimizer step 1"),
    "masked though trained": (
        (f"UPDATE slots SET disposition = 'masked' WHERE slot_id = '{SLOT0}'",), "slots", "step 1 says trained"),
    "dropped without a reason": (
        ("UPDATE slots SET reason = NULL WHERE disposition = 'dropped'",), "slots", "is dropped with reason None"),
    "a reason without a drop": (
        (f"UPDATE slots SET reason = 'stale' WHERE slot_id = '{SLOT0}'",), "slots", "is trained with reason 'stale'"),
    "an unknown disposition": (
        (f"UPDATE slots SET disposition = 'lost' WHERE slot_id = '{SLOT0}'",), "slots", "no disposition that exists"),
    "a rewarded attempt forgotten": (
        ("UPDATE slots SET disposition = 'pending', attempt_id = NULL WHERE disposition = 'ready'",),
        "slots", "is pending, but attempt .* can be used: it was lost"),
    "ready on a failed attempt": (
        ("UPDATE slots SET disposition = 'ready', attempt_id = '000-000005-000-00' WHERE slot_id = '000-000005-000'",),
        "slots", "not one of its own that can be used"),
    "ready on a stranger's attempt": (
        ("UPDATE slots SET attempt_id = '000-000000-000-00' WHERE disposition = 'ready'",), "slots", "not one of its own"),
    "a slot deleted": (
        ("DELETE FROM slots WHERE slot_id = '000-000005-000'",), "groups", "1 members numbered 1..1: a slot is missing"),
    "a slot deleted under its attempts": (
        ("DELETE FROM slots WHERE slot_id = '000-000005-000'",), "database", "a row of attempts refers to a row of slots"),
    "a group deleted": (
        ("DELETE FROM slots WHERE group_index = 3",), "groups", "5 groups numbered 0..5: a group is missing"),
    "a group of two tasks": (
        (f"UPDATE slots SET task_id = 'other' WHERE slot_id = '{SLOT0}'",), "groups", "mixes 2 tasks or efforts"),
    "a reward for a failure": (
        ("UPDATE attempts SET reward = 0.0 WHERE outcome = 'infra_failed'",),
        "attempts", "ended as infra_failed with reward 0.0"),
    "ungraded with a reward": (
        (f"UPDATE attempts SET is_graded = 0 WHERE attempt_id = '{ATTEMPT0}'",),
        "attempts", "ended as finished, ungraded, with reward 0.5"),
    "a finish without reward": (
        (f"UPDATE attempts SET reward = NULL WHERE attempt_id = '{ATTEMPT0}'",),
        "attempts", "ended as finished with reward None"),
    "another reward than was given": (
        (f"UPDATE attempts SET reward = 1.0 WHERE attempt_id = '{ATTEMPT0}'",), "attempts", "with reward 1.0, its trajectory"),
    "an outcome changed": (
        (f"UPDATE attempts SET outcome = 'budget_exhausted' WHERE attempt_id = '{ATTEMPT0}'",),
        "attempts", "ended as budget_exhausted .* its trajectory says"),
    "a trajectory deleted": (
        (f"UPDATE attempts SET trajectory = NULL WHERE attempt_id = '{ATTEMPT0}'",), "attempts", "without a trajectory"),
    "a trajectory damaged": (
        (f"UPDATE attempts SET trajectory = '{{' WHERE attempt_id = '{ATTEMPT0}'",), "attempts", "cannot be read"),
    "in flight though trained": (
        (f"UPDATE attempts SET outcome = NULL, reward = NULL WHERE attempt_id = '{ATTEMPT0}'",),
        "attempts", "is in flight, but its slot is trained"),
    "two in flight": (
        ("DROP INDEX one_open_attempt_per_slot",
         "INSERT INTO attempts (attempt_id, slot_id, number, opened_at) VALUES ('x', '000-000005-001', 1, 0)"),
        "attempts", "has 2 attempts in flight"),
    "an attempt deleted": (
        ("UPDATE attempts SET number = 1 WHERE outcome = 'infra_failed'",),
        "attempts", r"has attempts numbered \[1\]: one is missing"),
    "a block forgotten": (
        (f"DELETE FROM blocks WHERE attempt_id = '{ATTEMPT0}' AND block_index = 1",),
        "attempts", "names other blocks than the ledger"),
    "the first block forgotten": (
        (f"DELETE FROM blocks WHERE attempt_id = '{ATTEMPT0}' AND block_index = 0",),
        "blocks", "has block 1 where 0 is due"),
    "a hole in a context": (
        (f"UPDATE blocks SET start = 6 WHERE attempt_id = '{ATTEMPT0}' AND block_index = 1",),
        "blocks", "block 1 starts at 6, the one before ends at 5"),
    "another digest": (
        (f"UPDATE blocks SET digest = replace(digest, 'a', 'b') WHERE attempt_id = '{ATTEMPT0}'",),
        "blocks", "expected .* bytes with sha256"),
    "trained on nothing": (
        (f"DELETE FROM blocks WHERE attempt_id = '{ATTEMPT0}'",), "blocks", "was trained without one sampled token"),
    "a step missing": (
        ("DELETE FROM steps WHERE step = 2",), "steps", r"optimizer steps are \[1, 3\], expected 1..2"),
    "a step missing under its slots": (
        ("DELETE FROM steps WHERE step = 2",), "steps", "stands in optimizer step 2, which does not exist"),
    "an open step behind": (
        ("UPDATE steps SET state = 'open' WHERE step = 1",), "steps", "step 1 is open, but step 3 followed"),
    "an empty step": (
        ("INSERT INTO steps VALUES (4, 'committed', 0, 0)",), "steps", "optimizer step 4 has no slot"),
    "a checkpoint ahead": (
        ("UPDATE checkpoints SET step = 9",), "checkpoints", "names a checkpoint of step 9, but holds 3"),
    "more slots than the trainer took": (
        ("UPDATE uses SET step = 2 WHERE step = 3",), "metrics", "step 2 was taken with 2 slots, the ledger has 4"),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
def test_a_violation_in_the_ledger_is_found(run, what, capsys):
    statements, check, pattern = PLANTED[what]
    damage(run, *statements)
    found = audit(run).violations
    assert any(re.search(f"^{check}: .*{pattern}", sentence) for sentence in found), "\n".join(found)
    assert main(AuditRun(run=str(run))) == 1
    assert found[0] in capsys.readouterr().out


def flip(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def torn_metrics(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([lines[0].replace('"step": 1', '"step": 7'), *lines[1:]]))


def metrics_line(run, step):
    with MetricLogger(run, mode=WandbMode.disabled) as metrics:
        metrics.log({"train/loss": 0.1}, step=step)


FILES = {
    "a bit of a block flipped": (
        lambda run: flip(log_path(run / "blocks", ATTEMPT0), 150), "blocks", "block 000-000000-000-00/0 in .* expected"),
    "a block cut": (
        lambda run: log_path(run / "blocks", ATTEMPT0).write_bytes(log_path(run / "blocks", ATTEMPT0).read_bytes()[:-200]),
        "blocks", "block 000-000000-000-00/1 in .* expected"),
    "a log deleted": (
        lambda run: log_path(run / "blocks", ATTEMPT0).unlink(), "blocks", "is missing"),
    "a log of nobody": (
        lambda run: shutil.copy(log_path(run / "blocks", ATTEMPT0), run / "blocks" / "stranger.tokens"),
        "blocks", "stranger.tokens belongs to no attempt"),
    "a checkpoint ahead on disk": (
        lambda run: checkpoint(run, 4), "checkpoints", "step-4 is ahead of the ledger, which holds 3"),
    "the newest checkpoint deleted": (
        lambda run: shutil.rmtree(run / "checkpoints"), "checkpoints", "the newest checkpoint, step 2, is not on disk"),
    "a checkpoint of another step": (
        lambda run: (run / "checkpoints/step-2/state.json").write_text('{"num_steps": 1}'),
        "checkpoints", "step-2 holds the state of step 1"),
    "metrics deleted": (
        lambda run: (run / "metrics.jsonl").unlink(), "metrics", "step 1 has no line"),
    "metrics damaged": (torn_metrics, "metrics", "line 1 is damaged"),
    "a step taken twice": (lambda run: metrics_line(run, 2), "metrics", "step 2 2 times: it was taken twice"),
    "a step the ledger never saw": (
        lambda run: metrics_line(run, 5), "metrics", "has optimizer step 5, the ledger holds 3"),
    "a ledger overwritten": (
        lambda run: (run / "ledger.sqlite").write_bytes(b"no database" * 500), "database", "cannot read the ledger"),
}  # fmt: skip


@pytest.mark.parametrize("what", FILES)
def test_a_violation_in_the_files_is_found(run, what):
    plant, check, pattern = FILES[what]
    plant(run)
    found = audit(run).violations
    assert any(re.search(f"^{check}: .*{pattern}", sentence) for sentence in found), "\n".join(found)
    assert main(AuditRun(run=str(run))) == 1


def test_every_check_has_a_planted_violation():
    planted = {check for _, check, _ in PLANTED.values()} | {check for _, check, _ in FILES.values()}
    assert planted == set(CHECKS)


def test_damage_inside_the_database_file_is_a_violation(run):
    db = sqlite3.connect(run / "ledger.sqlite")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.execute("PRAGMA journal_mode = DELETE")
    page, root = (db.execute(sql).fetchone()[0] for sql in
                  ("PRAGMA page_size", "SELECT rootpage FROM sqlite_master WHERE name = 'slots'"))  # fmt: skip
    db.close()
    data = bytearray((run / "ledger.sqlite").read_bytes())
    data[(root - 1) * page : root * page] = b"\xff" * page
    (run / "ledger.sqlite").write_bytes(data)
    found = audit(run).violations
    assert found
    assert all(sentence.startswith("database: ") for sentence in found)


def test_a_folder_that_is_no_run_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match=r"is not the folder of an RL run: .*ledger.sqlite is missing"):
        main(AuditRun(run=str(tmp_path)))


def test_a_log_that_ends_in_the_middle_of_a_turn_is_no_violation(run):
    """In flight or abandoned attempts may leave torn logs; nothing refers to them."""
    attempt = "000-000005-001-00"
    log = TokenLog(run / "blocks", attempt)
    log.open_turn(context_id="0", turn=0, start=0, input_ids=[1, 2])
    log.close()
    path = log_path(run / "blocks", attempt)
    path.write_bytes(path.read_bytes()[:-3])
    assert read_log(path).damage is not None
    assert audit(run).violations == []


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda run: (run / "checkpoints" / "step-2" / "state.json").write_text("[]"),
            "step-2 holds the state of step None",
        ),
        (
            lambda run: (run / "checkpoints" / "step-2" / "state.json").write_bytes(b"\xff"),
            "holds the state of step None",
        ),
        (lambda run: swap_for_folder(next((run / "blocks").iterdir())), "cannot be read (Is a directory)"),
        (lambda run: swap_for_folder(run / "checkpoints" / "step-2" / "state.json"), "holds the state of step None"),
        (lambda run: (run / "ledger.sqlite").write_bytes(b""), "database: "),
        (lambda run: (run / "ledger.sqlite").write_bytes(b"x" * 9000), "file is not a database"),
    ],
    ids=range(6),
)
def test_damage_of_any_form_is_a_violation_never_a_crash(run, damage, says):
    damage(run)
    report = audit(run)
    assert any(says in sentence for sentence in report.violations), report.violations


def swap_for_folder(path) -> None:
    path.unlink()
    path.mkdir()


def test_a_ledger_with_random_bytes_in_it_is_reported(run, tmp_path):
    whole = (run / "ledger.sqlite").read_bytes()
    chance = random.Random(5)
    found = 0
    for _ in range(25):
        content = bytearray(whole)
        for _ in range(60):
            content[chance.randrange(100, len(content))] = chance.randrange(256)
        (run / "ledger.sqlite").write_bytes(content)
        for name in ("ledger.sqlite-wal", "ledger.sqlite-shm"):
            (run / name).unlink(missing_ok=True)
        found += not audit(run).is_clean
    assert found >= 20
