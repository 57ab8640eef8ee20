"""burnish eval: every task of a split, played and graded, and a summary that carries its conditions and its interval.

`results.jsonl` has one line an episode, appended when it ends; the same command goes on where an interrupted one stopped.
An episode that infrastructure or the verifier failed is tried again and in the end counts as ungraded, never as failed.
The oracle and the no-op play without a model: no torch, no Ray.
"""

import asyncio
import errno
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from burnish.envs.errors import UserError
from burnish.envs.task import Task
from burnish.envs.taskset import TaskSet
from burnish.policy.checkpoint.folder_lock import held
from burnish.policy.checkpoint.json_file import read_object
from burnish.policy.checkpoint.lineage import policy_hash
from burnish.policy.checkpoint.whole_files import write_json
from burnish.policy.encoding.tokenizer import check_fits
from burnish.policy.training.progress import Progress
from burnish.rollout.agents import solution_commands
from burnish.rollout.config import Agent, EvalRun
from burnish.rollout.driver import check_prompts
from burnish.rollout.settings import EpisodeSettings
from burnish.rollout.sources import (
    NO_SANDBOX,
    acts_on_prompts,
    check_verifier,
    load_tasks,
    name_of,
    open_harness,
    open_machines,
    path_of,
)
from burnish.rollout.stats import pass_rates, rate_interval, read_results
from burnish.rollout.types import Slot, Trajectory
from burnish.rollout.worker import EpisodeRunner

logger = logging.getLogger(__name__)

RESULTS, SUMMARY, CONDITIONS = "results.jsonl", "summary.json", "conditions.json"
TRAJECTORIES = "trajectories.jsonl"


def main(run: EvalRun) -> int:
    """Plays what is not played yet, then writes the summary; 1 when nothing could be graded."""
    taskset = load_tasks(run)
    split = run.split or ("heldout" if "heldout" in taskset.splits else next(iter(sorted(taskset.splits))))
    tasks = taskset.split(split)[: run.limit or None]
    check(run, tasks, split)
    out = Path(run.out or Path("runs") / "eval" / f"{run.agent}-{name_of(run)}")
    conditions = conditions_of(run, taskset, split)
    with held(out):
        claim(out, conditions)
        return evaluate(run, tasks, split, out, conditions)


def evaluate(run: EvalRun, tasks: Sequence[Task], split: str, out: Path, conditions: dict[str, Any]) -> int:
    """Plays and summarises in a folder that is this evaluation's."""
    rows = (
        {(row["task"], row.get("sample")): row for row in read_results(out / RESULTS)}
        if (out / RESULTS).exists()
        else {}
    )
    left = [
        Episode(task=task, number=number, sample=sample)
        for number, task in enumerate(tasks)
        for sample in range(run.samples)
        if (task.id, sample) not in rows
    ]
    if left:
        asyncio.run(play_all(run, out, left, done=len(rows)))
    # read back rather than kept: what is reported is what is on disk
    rows = {(row["task"], row.get("sample")): row for row in read_results(out / RESULTS)}
    wanted = [rows[task.id, sample] for task in tasks for sample in range(run.samples)]
    summary = summarise(wanted, run) | {"conditions": conditions, "written": round(time.time(), 3)}
    write_json(out / SUMMARY, summary)
    total = summary["all"]
    logger.info(
        "%s on %s (%s, %d tasks): pass %.3f [%.3f, %.3f], %d ungraded; results in %s",
        run.stage or run.agent,
        path_of(run),
        split,
        len(tasks),
        total["pass"],
        total["lo"],
        total["hi"],
        summary["ungraded"],
        out,
    )
    if summary["ungraded"]:
        first = next(row for row in wanted if row["passed"] is None)
        logger.warning("Ungraded, the first of %d: %s: %s", summary["ungraded"], first["task"], first["error"])
    return 0 if summary["graded"] else 1


def check(run: EvalRun, tasks: Sequence[Task], split: str) -> None:
    """What can be wrong with an evaluation, found before its folder exists.

    Raises:
        UserError, ValueError: what is wrong, and where.
    """
    if not tasks:
        raise UserError(f"{path_of(run)}: split {split} holds no task")
    harness = open_harness(run)
    if acts_on_prompts(run):
        check_verifier(run, tasks, None)
    if run.agent is Agent.oracle:
        for task in tasks:
            solution_commands(task)
    if run.agent is Agent.policy:
        if not (Path(run.policy) / "config.json").is_file():
            raise UserError(f"policy={run.policy}: not a policy folder (no config.json in it)")
        tokenizer = check_fits(Path(run.policy), run.encoding.system_token_id)
        check_prompts(run, tasks, harness, tokenizer)


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One episode to play."""

    task: Task
    number: int
    """Of the task within the split."""
    sample: int


def conditions_of(run: EvalRun, taskset: TaskSet, split: str) -> dict[str, Any]:
    """What a number of this evaluation depends on, beside the code."""
    is_policy = run.agent is Agent.policy
    return {
        "agent": str(run.agent),
        "policy": policy_hash(Path(run.policy)) if is_policy else None,
        "task_set": taskset.content_hash,
        "split": split,
        "limit": run.limit,
        "samples": run.samples,
        "harness": run.harness,
        "verifier": run.verifier,
        "sandbox": NO_SANDBOX if acts_on_prompts(run) else str(run.sandbox),
        "grading": {"style": str(run.grading.style), "options": run.grading.options} if acts_on_prompts(run) else None,
        "sampling": asdict(run.sampling) if is_policy else None,
        "thinking": run.encoding.thinking,
        "effort": run.encoding.effort if run.encoding.thinking else None,
        "episode": asdict(run.episode),
        "seed": run.seed,
    }


def claim(out: Path, conditions: dict[str, Any]) -> None:
    """Starts the folder, or makes sure that it holds this very evaluation.

    Raises:
        UserError: it holds another one; says what differs.
    """
    path = out / CONDITIONS
    has_results = (out / RESULTS).is_file() and (out / RESULTS).stat().st_size > 0
    # where nothing was played, nothing depends on the conditions: a mistake can be mended and the command given again
    if path.is_file() and has_results:
        before = read_object(path, advice=f"remove {out} or give another out=DIR")
        for key, value in conditions.items():
            if before.get(key) != value:
                raise UserError(
                    f"{out} holds an evaluation with {key}={before.get(key)}, this one has {value}: give another out=DIR"
                )
        return
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, conditions)


async def play_all(run: EvalRun, out: Path, episodes: Sequence[Episode], done: int) -> None:
    """Plays episodes, `concurrency` at a time, and appends each result as it comes."""
    settings = EpisodeSettings.of(
        run,
        run_id=f"eval-{out.name}-{os.getpid()}",
        agent=run.agent,
        blocks=str(out / "blocks"),
        concurrency=run.concurrency,
    )
    sandboxes = open_machines(run)
    engine = None
    if run.agent is Agent.policy:
        from burnish.rollout.generator import open_engine

        tokenizer = check_fits(Path(run.policy), run.encoding.system_token_id)
        engine = open_engine(Path(run.policy), run.engine.reserving(tokenizer.never_written()), "engine")
    runner = EpisodeRunner(settings, {e.task.id: e.task for e in episodes}, sandboxes, engine)
    admitted = asyncio.Semaphore(run.concurrency)
    results, trajectories = open_log(out / RESULTS), open_log(out / TRAJECTORIES)
    try:
        with Progress("eval", done + len(episodes), done=done) as progress:

            async def play(episode: Episode) -> None:
                async with admitted:
                    trajectory, attempts = await play_until_graded(runner, episode, run.max_attempts, out)
                append(trajectories, trajectory.to_dict())
                append(results, result_of(episode, trajectory, attempts))
                progress.advance()

            async with asyncio.TaskGroup() as group:
                for episode in episodes:
                    group.create_task(play(episode))
    finally:
        os.close(results)
        os.close(trajectories)
        await runner.close()
        if engine is not None:
            engine.close()


async def play_until_graded(
    runner: EpisodeRunner, episode: Episode, max_attempts: int, out: Path
) -> tuple[Trajectory, int]:
    """The first attempt with a reward, or the last one."""
    slot = Slot(task_id=episode.task.id, group_index=episode.number, member=episode.sample)
    # attempts of an interrupted evaluation have left their token logs: an attempt id is never used again
    first = 0
    while any((out / "blocks").glob(f"{slot.attempt_id(first)}.*")):
        first += 1
    attempts = 0
    while True:
        trajectory = await runner.play(slot, slot.attempt_id(first + attempts), 0)
        attempts += 1
        if trajectory.has_reward or attempts == max_attempts:
            return trajectory, attempts


def result_of(episode: Episode, trajectory: Trajectory, attempts: int) -> dict[str, Any]:
    """One line of results.jsonl; `passed` and `reward` are null where nothing could be graded."""
    metadata, high = episode.task.config.metadata, episode.task.config.reward_range[1]
    return {
        "task": episode.task.id,
        "sample": episode.sample,
        "domain": metadata.get("domain", "all"),
        "family": metadata.get("family", ""),
        "passed": trajectory.reward >= high if trajectory.has_reward else None,
        "reward": trajectory.reward if trajectory.has_reward else None,
        "outcome": str(trajectory.outcome),
        "stop_reason": str(trajectory.stop_reason),
        "turns": len(trajectory.turns),
        "tokens": trajectory.num_sampled,
        "seconds": round(trajectory.wall_s, 3),
        "attempts": attempts,
        "error": trajectory.error,
    }


def summarise(rows: Sequence[dict[str, Any]], run: EvalRun) -> dict[str, Any]:
    """Pass rates with intervals, over all and by domain and family, and what the episodes were like."""
    graded = [row for row in rows if row["passed"] is not None]
    domains = sorted({row["domain"] for row in rows})
    families = sorted({row["family"] for row in rows if row["family"]})

    def table(chosen: Sequence[dict[str, Any]]) -> dict[str, Any]:
        rates = pass_rates(list(chosen))
        interval = rate_interval(rates, samples=run.samples, seed=run.seed, confidence=run.confidence)
        return {"pass": interval.mean, "n": interval.n, "lo": interval.lo, "hi": interval.hi}

    return {
        "stage": run.stage or str(run.agent),
        "agent": str(run.agent),
        "harness": run.harness,
        "tasks": path_of(run),
        "policy": run.policy or None,
        "samples": run.samples,
        "confidence": run.confidence,
        "interval": "wilson over tasks" if run.samples == 1 else "bootstrap over tasks",
        "graded": len(graded),
        "ungraded": len(rows) - len(graded),
        "all": table(rows),
        "domains": {domain: table([row for row in rows if row["domain"] == domain]) for domain in domains},
        "families": {family: table([row for row in rows if row["family"] == family]) for family in families},
        "outcomes": dict(Counter(row["outcome"] for row in rows)),
        "mean_reward": float(np.mean([row["reward"] for row in graded])) if graded else None,
        "mean_turns": float(np.mean([row["turns"] for row in rows])),
        "mean_tokens": float(np.mean([row["tokens"] for row in rows])),
    }


def open_log(path: Path) -> int:
    """Opens for appending; half a line that a kill left is cut off. Returns the descriptor."""
    if path.is_file():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def append(file: int, row: dict[str, Any]) -> None:
    """One line, whole or not at all: half a line would be damage once another follows it.

    Raises:
        OSError: the disk is full.
    """
    line = (json.dumps(row) + "\n").encode()
    size = os.fstat(file).st_size
    written = os.write(file, line)
    if written < len(line):
        os.ftruncate(file, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
