"""burnish rl: check what was given, start the processes, run the loop, write the policy.

Everything a user can get wrong is found here, before an actor starts. A killed run goes on with `burnish rl resume=RUN`:
its processes and containers are swept, the newest training state is loaded, and the ledger becomes that state's.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from burnish.configs.schema import to_yaml
from burnish.envs.config import ReapRun, SandboxKind
from burnish.envs.errors import UserError
from burnish.envs.sandbox import reap
from burnish.envs.sandbox.lease import driver_identity
from burnish.envs.task import Task
from burnish.policy.checkpoint.json_file import read_object
from burnish.policy.checkpoint.lineage import code_version, policy_hash
from burnish.policy.checkpoint.whole_files import write_json, write_text
from burnish.policy.encoding.conversation import Conversation
from burnish.policy.encoding.tokenizer import check_fits
from burnish.policy.released_config import load_config
from burnish.policy.training.metrics import MetricLogger, WandbMode
from burnish.policy.training.progress import Progress
from burnish.rollout import cluster
from burnish.rollout.advantage import load_advantage
from burnish.rollout.config import Agent, RlRun
from burnish.rollout.controller import Controller
from burnish.rollout.guard import Action, GuardTripped
from burnish.rollout.ledger import Ledger
from burnish.rollout.ledger_schema import LedgerError
from burnish.rollout.losses import check_corrections, load_loss
from burnish.rollout.ray_actors import RayActors
from burnish.rollout.settings import EpisodeSettings, TrainerSettings
from burnish.rollout.sources import check_verifier, load_tasks, open_harness, open_machines, path_of
from burnish.rollout.types import ActorGone, DropReason

logger = logging.getLogger(__name__)

CONFIG, MANIFEST, LEDGER = "config.yaml", "manifest.json", "ledger.sqlite"


def main(run: RlRun) -> int:
    """Trains to the last optimizer step and writes `<run folder>/policy`."""
    is_resumed = bool(run.resume)
    if is_resumed:
        run = read_run(run)
    run_dir = Path(run.runs) / run.name
    tasks, task_set = check(run)
    # before the folder is taken: what is mended there and then needs no other folder
    kind = None if is_resumed else sandbox_kind(run, tasks)
    manifest = claim(run_dir, run, task_set, is_resumed)
    # a policy that somebody took away is written again, from the last training state
    if manifest["finished"] and (run_dir / "policy").is_dir():
        logger.info("RL is done already: %s", run_dir / "policy")
        return 0
    try:
        ledger = Ledger(run_dir / LEDGER)
    except LedgerError as error:
        raise UserError(str(error)) from error
    try:
        run.sandbox = kind or sandbox_kind(run, tasks)
        run.limits = replace(run.limits, driver=driver_identity())
        # engine and trainer alike: a token that cannot be sampled has no share in the probabilities
        tokenizer = check_fits(Path(run.policy), run.encoding.system_token_id)
        run.engine = run.engine.reserving(tokenizer.never_written())
        reap.main(ReapRun(engine_url=run.limits.engine_url))
        joined = cluster.start(run.cluster)
        try:
            asyncio.run(train(run, run_dir, tasks, ledger, manifest, is_resumed))
        except GuardTripped as tripped:
            logger.error("Paused: %s. Look at %s, then go on with `burnish rl resume=%s`", tripped, run_dir, run_dir)
            return 1
        finally:
            joined.stop()
            # what a worker was making while it died
            reap.reap_driver(run.limits.engine_url, run.limits.driver)
    finally:
        ledger.close()
    logger.info(
        "RL is done: policy %s, metrics %s, ledger %s", run_dir / "policy", run_dir / "metrics.jsonl", ledger.path
    )
    return 0


async def train(
    run: RlRun, run_dir: Path, tasks: Sequence[Task], ledger: Ledger, manifest: dict[str, Any], is_resumed: bool
) -> None:
    """The run's processes around the loop. A trainer that dies, and a rule that takes the run back, are one more start.

    Raises:
        GuardTripped: a rule pauses the run; what it did so far is saved.
    """
    actors = RayActors(run.cluster, trainer_settings(run, run_dir), episode_settings(run, run_dir), run.engine)
    num_rollbacks = 0
    try:
        version = await actors.open()
        while True:
            try:
                steps = await train_from(version, run, run_dir, tasks, ledger, actors, is_resumed=is_resumed)
                policy = await actors.export(str(run_dir / "policy"), manifest["parents"])
                break
            except ActorGone as error:
                if error.actor != "trainer":
                    raise
                version = await actors.revive_trainer()
            except GuardTripped as tripped:
                num_rollbacks += 1
                if tripped.action is Action.pause or num_rollbacks > run.max_rollbacks:
                    raise
                version = await actors.roll_back(tripped.since)
                undone = ledger.load_checkpoint(version).returned
                # the same slots would lead to the same place
                ledger.drop(undone, DropReason.rolled_back)
                logger.warning("%s: back at version %d without %d slots", tripped, version, len(undone))
            is_resumed = True
        facts = {"finished": True, "policy": policy_hash(Path(policy)), "steps": steps}
        write_json(run_dir / MANIFEST, manifest | facts)
    finally:
        await actors.close()


async def train_from(
    version: int,
    run: RlRun,
    run_dir: Path,
    tasks: Sequence[Task],
    ledger: Ledger,
    actors: RayActors,
    *,
    is_resumed: bool,
) -> int:
    """The loop from a checkpoint to the end; returns how many optimizer steps the policy has taken.

    Raises:
        ActorGone: the trainer died.
    """
    restored = ledger.load_checkpoint(version)
    if is_resumed:
        logger.info(
            "Resumed at version %d: %d slots of later steps are ready again, %d attempts were in flight",
            version, len(restored.returned), len(restored.abandoned),
        )  # fmt: skip
    mode = WandbMode[run.wandb]
    with (
        MetricLogger(run_dir, mode=mode, resumed_from=version if is_resumed else None) as metrics,
        Progress("rl", run.max_steps, done=version) as progress,
    ):

        def log(values: dict[str, float], step: int) -> None:
            metrics.log(values, step=step, policy_version=step)
            if "rollout/reward" in values:
                progress.advance(step - progress.done, reward=values["rollout/reward"])

        controller = Controller(run, tasks, ledger, run_dir / "blocks", actors, log, version)
        await controller.run()
        for name, counters in (await actors.stats()).items():
            log({f"{name}/{key}": value for key, value in counters.items()}, controller.version)
    return controller.version


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
    model = load_config(Path(run.policy))
    longest = run.episode.max_context_tokens
    if longest > model.max_position_embeddings:
        raise UserError(
            f"episode.max_context_tokens={longest} is more than the policy's context of {model.max_position_embeddings}"
        )
    harness = open_harness(run)
    load_advantage(run.algo.advantage, run.algo.advantage_options)
    check_corrections(load_loss(run.algo.loss, run.algo.loss_options), is_decoupled=run.algo.decoupled)
    tokenizer = check_fits(Path(run.policy), run.encoding.system_token_id)
    if not tasks:
        raise UserError(f"{path_of(run)}: split {run.split} holds no task")
    for task in tasks:
        prompt = len(Conversation(tokenizer, run.encoding).append(harness.opening(task)))
        if prompt >= longest:
            raise UserError(f"{task.where}: its prompt has {prompt} tokens, episode.max_context_tokens is {longest}")
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


def read_run(run: RlRun) -> RlRun:
    """The settings of the run that is gone on with.

    Raises:
        UserError: there is none, or other settings were given beside resume.
    """
    path = Path(run.resume) / CONFIG
    if not path.is_file():
        raise UserError(f"resume={run.resume}: no RL run there ({path} is missing)")
    if replace(run, resume="") != RlRun():
        raise UserError(f"resume={run.resume} takes its settings from {path}: give no other key")
    try:
        stored = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RlRun), OmegaConf.load(path)))
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError, OSError) as error:
        raise UserError(f"{path}: not the settings of an RL run that this version reads ({error})") from error
    assert isinstance(stored, RlRun)
    # the folder may have been moved or be named from another place
    folder = Path(run.resume).resolve()
    return replace(stored, runs=str(folder.parent), name=folder.name)


def claim(run_dir: Path, run: RlRun, task_set: str, is_resumed: bool) -> dict[str, Any]:
    """Starts the run folder, or makes sure that it is what is gone on with; returns its manifest.

    Raises:
        UserError: the folder is taken, or the tasks or the policy are no longer those the run started from.
    """
    parents = {"policy": policy_hash(Path(run.policy)), "tasks": task_set}
    path = run_dir / MANIFEST
    if is_resumed:
        manifest = read_object(path, "parents", "finished", advice="take the run's folder from a copy, or start again")
        for name, digest in parents.items():
            if manifest["parents"].get(name) != digest:
                changed = run.policy if name == "policy" else path_of(run)
                raise UserError(f"{changed} has changed since {run_dir} was started: {name} has another hash")
        return manifest
    if (run_dir / CONFIG).exists():
        raise UserError(f"{run_dir} holds a run: go on with `burnish rl resume={run_dir}`, or choose another name=")
    run_dir.mkdir(parents=True, exist_ok=True)
    manifest = {"stage": "rl", "parents": parents, "code": code_version(), "finished": False}
    write_json(path, manifest)
    write_text(run_dir / CONFIG, to_yaml(run))
    return manifest


def trainer_settings(run: RlRun, run_dir: Path) -> TrainerSettings:
    train = run.train
    if train.decay_steps:
        # the length of the run is known here, and a decay without it would silently not happen
        train = replace(train, total_steps=train.total_steps or run.max_steps)
    return TrainerSettings(
        policy=run.policy,
        blocks=str(run_dir / "blocks"),
        checkpoints=str(run_dir / "checkpoints"),
        weights=str(run_dir / "weights"),
        train=train,
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
