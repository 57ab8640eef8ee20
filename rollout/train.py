"""burnish rl: check what was given, then act and learn (driver.py).

Everything a user can get wrong is found here, before an actor starts.
"""

from collections.abc import Sequence
from pathlib import Path

from burnish.configs.schema import to_yaml
from burnish.envs.config import SandboxKind
from burnish.envs.errors import UserError
from burnish.envs.task import Task
from burnish.policy.checkpoint.lineage import policy_hash
from burnish.rollout.advantage import load_advantage
from burnish.rollout.batch import former_of
from burnish.rollout.config import Agent, RlRun
from burnish.rollout.driver import Stage, check_policy, check_prompts, drive, schedule_of
from burnish.rollout.losses import check_corrections, load_loss
from burnish.rollout.rollouts import effort_of, order_of
from burnish.rollout.run_folder import Parent, read_run
from burnish.rollout.settings import EpisodeSettings, TrainerSettings
from burnish.rollout.sources import check_verifier, load_tasks, open_harness, open_machines, path_of


def main(run: RlRun) -> int:
    """Trains to the last optimizer step and writes `<run folder>/policy`."""
    is_resumed = bool(run.resume)
    if is_resumed:
        run = read_run(run, "rl")
    run_dir = Path(run.runs) / run.name
    tasks, task_set = check(run)
    return drive(
        Stage(
            verb="rl",
            run=run,
            pacing=run.algo,
            is_resumed=is_resumed,
            settings=to_yaml(run),
            parents={
                "policy": Parent(hash=policy_hash(Path(run.policy)), path=run.policy),
                "tasks": Parent(hash=task_set, path=path_of(run)),
            },
            order=order_of(tasks, run.algo.group_size, effort_of(run.encoding), run.seed),
            form=former_of(run, run_dir / "blocks"),
            machines=lambda: sandbox_kind(run, tasks),
            trainer=lambda: trainer_settings(run, run_dir),
            episodes=lambda: episode_settings(run, run_dir),
            shown="rollout/reward",
        )
    )


def check(run: RlRun) -> tuple[Sequence[Task], str]:
    """Everything that can be known before a process starts; returns the tasks and the hash of their set.

    Raises:
        UserError, ValueError: what is wrong, and where.
    """
    for key, value in (("tasks", path_of(run)), ("policy", run.policy)):
        if not value:
            raise UserError(
                f"{key} is not set: burnish rl needs tasks=DIR or data.path=FILE, and policy=DIR; or resume=RUN"
            )
    task_set = load_tasks(run)
    tasks = task_set.split(run.split)
    harness = open_harness(run)
    load_advantage(run.algo.advantage, run.algo.advantage_options)
    check_corrections(load_loss(run.algo.loss, run.algo.loss_options), is_decoupled=run.algo.decoupled)
    tokenizer = check_policy(run)
    if not tasks:
        raise UserError(f"{path_of(run)}: split {run.split} holds no task")
    check_prompts(run, tasks, harness, tokenizer)
    return tasks, task_set.content_hash


def sandbox_kind(run: RlRun, tasks: Sequence[Task]) -> SandboxKind:
    """Asked for in the driver: a missing engine is told before anything starts, and every worker gets the same kind.

    Raises:
        UserError: no engine answers, there is no such verifier, or it lacks something of a prompt.
    """
    sandboxes = open_machines(run)
    try:
        check_verifier(run, tasks, sandboxes)
    finally:
        if sandboxes is not None:
            sandboxes.close()
    return run.sandbox if sandboxes is None else sandboxes.kind


def trainer_settings(run: RlRun, run_dir: Path) -> TrainerSettings:
    return TrainerSettings(
        policy=run.policy,
        blocks=str(run_dir / "blocks"),
        checkpoints=str(run_dir / "checkpoints"),
        weights=str(run_dir / "weights"),
        train=schedule_of(run),
        algo=run.algo,
        temperature=run.sampling.temperature,
        reserved_ids=tuple(run.engine.reserved_ids),
        max_rollout_tokens=run.episode.max_turns * run.episode.max_turn_tokens,
        tokens_per_micro_batch=run.tokens_per_micro_batch,
        deterministic=run.engine.deterministic,
    )


def episode_settings(run: RlRun, run_dir: Path) -> EpisodeSettings:
    return EpisodeSettings.of(
        run,
        run_id=run.name,
        agent=Agent.policy,
        blocks=str(run_dir / "blocks"),
        concurrency=run.cluster.episodes_per_worker,
    )
