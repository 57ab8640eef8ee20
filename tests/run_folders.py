"""Run folders by hand, with real ledgers and metrics, and text in them that means harm."""

import json
from pathlib import Path

from burnish.policy.training.metrics import MetricLogger, WandbMode
from burnish.rollout.ledger import Ledger, Use
from burnish.rollout.types import DropReason, Slot, StopReason, Trajectory, Turn
from burnish.verifiers.types import Outcome, Verdict

HOSTILE = (
    "</script></pre></details><script>alert(1)</script><img src=x onerror=alert(2)>&amp; 'q' \"d\" \x1b[31m\x00 \ud800"
)


def trajectory(slot: Slot, attempt_id: str, reward: float | None, text: str = "ls") -> Trajectory:
    verdict = None
    if reward is not None:
        verdict = Verdict(
            reward=reward, rewards={"reward": reward}, tests_run=2, tests_passed=int(2 * reward), log=text,
            duration_s=0.1, artifacts_hash="a",
        )  # fmt: skip
    turns = (
        Turn(index=0, context_id="0", action=text, observation=text, exit_code=0, num_sampled_tokens=5),
        Turn(index=1, context_id="0", action="exit", num_sampled_tokens=2),
    )
    return Trajectory(
        slot=slot, attempt_id=attempt_id, outcome=Outcome.finished if verdict else Outcome.infra_failed,
        stop_reason=StopReason.exit if verdict else StopReason.sandbox_error, turns=turns, verdict=verdict,
        error="" if verdict else text, version_start=0, version_end=1,
    )  # fmt: skip


def write_rl(folder: Path, text: str = "ls") -> Ledger:
    """Groups 0 and 1 trained in steps 1 and 2, 2 dropped, 3 half played; the ledger is left open."""
    folder.mkdir(parents=True)
    ledger = Ledger(folder / "ledger.sqlite")
    slots = [[Slot(task_id=f"task-{g}", group_index=g, member=m) for m in range(2)] for g in range(4)]
    for group in slots:
        ledger.add_slots(group)
    for number, slot in enumerate([*slots[0], *slots[1], *slots[2], slots[3][0]]):
        reward = None if number == 6 else float(number % 2)
        ledger.close_attempt(trajectory(slot, ledger.open_attempt(slot.slot_id), reward, text))
    ledger.drop([slot.slot_id for slot in slots[2]], DropReason.zero_variance)
    with MetricLogger(folder, mode=WandbMode.disabled) as metrics:
        for step in (1, 2):
            ledger.begin_step(step, [Use(slot_id=s.slot_id, weight=0.5, num_tokens=7) for s in slots[step - 1]])
            ledger.commit_step(step)
            values = {"train/loss": 0.5, "train/entropy": 1.0, "train/grad_norm": 2.0, "train/mismatch_kl_fresh": 0.0}
            values |= {
                "rollout/reward": step / 4,
                "train/lr": 1e-3,
                "train/ratio": float("nan"),
                f"train/{text[:40]}": 1.0,
            }
            metrics.log(values, step=step, policy_version=step)
    config = "tasks: {}\nname: {}\n".format(folder / "tasks", json.dumps(text.replace("\ud800", "")))
    (folder / "config.yaml").write_text(config)
    manifest = {"stage": "rl", "parents": {"policy": "a" * 64, "tasks": text}, "code": text, "finished": False}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return ledger


def write_eval(folder: Path, passed: list[bool | None], stage: str, written: float = 0.0, text: str = "ls") -> None:
    """An evaluation of one domain; without `written` it has not ended."""
    folder.mkdir(parents=True)
    rows = [
        {"task": f"t{i}", "sample": 0, "domain": "terminal", "passed": p, "attempts": 1} for i, p in enumerate(passed)
    ]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "conditions.json").write_text(json.dumps({"agent": "policy", "task_set": "b" * 64, "policy": "c" * 64}))
    slot = Slot(task_id="t0", group_index=0, member=0)
    lines = [trajectory(slot, "000-000000-000-00", float(bool(passed[0])), text).to_dict()]
    (folder / "trajectories.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if written:
        (folder / "summary.json").write_text(
            json.dumps({"stage": stage, "domains": {}, "written": written, "tasks": text})
        )
