"""A stage that acts and learns, from checked settings to its policy: run folder, ledger, processes, loop, lineage.

Shared by `burnish rl` and `burnish distill`; which slots there are, what is made of them and what trains are the stage's.
A killed run goes on with `resume=RUN`: its processes and containers are swept, the newest training state is loaded, and
the ledger becomes that state's.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from burnish.envs.config import ReapRun, SandboxKind
from burnish.envs.errors import UserError
from burnish.envs.sandbox import reap
from burnish.envs.sandbox.lease import driver_identity
from burnish.envs.task import Task
from burnish.policy.checkpoint.lineage import policy_hash
from burnish.policy.checkpoint.whole_files import write_json
from burnish.policy.encoding.conversation import Conversation
from burnish.policy.encoding.tokenizer import Tokenizer, check_fits
from burnish.policy.released_config import load_config
from burnish.policy.training.config import TrainConfig
from burnish.policy.training.metrics import MetricLogger, WandbMode
from burnish.policy.training.progress import Progress
from burnish.rollout import cluster
from burnish.rollout.batch import FormBatch
from burnish.rollout.config import ActingRun, EvalRun, PacingConfig
from burnish.rollout.controller import Controller
from burnish.rollout.guard import Action, GuardTripped
from burnish.rollout.harness.base import Harness
from burnish.rollout.ledger import Ledger
from burnish.rollout.ledger_schema import LedgerError
from burnish.rollout.ray_actors import RayActors
from burnish.rollout.rollouts import Order
from burnish.rollout.run_folder import LEDGER, MANIFEST, Parent, claim
from burnish.rollout.settings import EpisodeSettings, PolicyTrainerSettings
from burnish.rollout.types import ActorGone, DropReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage whose settings were checked."""

    verb: str
    run: ActingRun
    pacing: PacingConfig
    """The loop's part of its `algo`."""
    is_resumed: bool
    settings: str
    """The run's settings as YAML, for a new folder."""
    parents: Mapping[str, Parent]
    """Everything that goes in."""
    order: Order
    form: FormBatch
    machines: Callable[[], SandboxKind]
    """Looks for the sandboxes that the run asks for: what is missing is told before anything starts."""
    trainer: Callable[[], PolicyTrainerSettings]
    """Asked once the run's engine and sandboxes are settled; `episodes` likewise."""
    episodes: Callable[[], EpisodeSettings]
    shown: str
    """Metric beside the progress."""

    @property
    def folder(self) -> Path:
        """Run folder."""
        return Path(self.run.runs) / self.run.name

    @property
    def blocks(self) -> Path:
        """Folder of the token logs."""
        return self.folder / "blocks"


def drive(stage: Stage) -> int:
    """Trains to the last optimizer step and writes `<run folder>/policy`; returns the exit code."""
    run, run_dir = stage.run, stage.folder
    # before the folder is taken: what is mended there and then needs no other folder
    kind = None if stage.is_resumed else stage.machines()
    manifest = claim(
        run_dir, stage=stage.verb, parents=stage.parents, settings=stage.settings, is_resumed=stage.is_resumed
    )
    # a policy that somebody took away is written again, from the last training state
    if manifest["finished"] and (run_dir / "policy").is_dir():
        logger.info("%s is done already: %s", stage.verb, run_dir / "policy")
        return 0
    try:
        ledger = Ledger(run_dir / LEDGER)
    except LedgerError as error:
        raise UserError(str(error)) from error
    try:
        run.sandbox = kind or stage.machines()
        run.limits = replace(run.limits, driver=driver_identity())
        # engine and trainer alike: a token that cannot be sampled has no share in the probabilities
        tokenizer = check_fits(Path(run.policy), run.encoding.system_token_id)
        run.engine = run.engine.reserving(tokenizer.never_written())
        reap.main(ReapRun(engine_url=run.limits.engine_url))
        joined = cluster.start(run.cluster)
        try:
            asyncio.run(train(stage, ledger, manifest))
        except GuardTripped as tripped:
            logger.error(
                "Paused: %s. Look at %s, then go on with `burnish %s resume=%s`", tripped, run_dir, stage.verb, run_dir
            )
            return 1
        finally:
            joined.stop()
            # what a worker was making while it died
            reap.reap_driver(run.limits.engine_url, run.limits.driver)
    finally:
        ledger.close()
    logger.info(
        "%s is done: policy %s, metrics %s, ledger %s",
        stage.verb, run_dir / "policy", run_dir / "metrics.jsonl", ledger.path,
    )  # fmt: skip
    return 0


async def train(stage: Stage, ledger: Ledger, manifest: dict[str, Any]) -> None:
    """The run's processes around the loop. A trainer that dies, and a rule that takes the run back, are one more start.

    Raises:
        GuardTripped: a rule pauses the run; what it did so far is saved.
    """
    run, is_resumed = stage.run, stage.is_resumed
    actors = RayActors(run.cluster, stage.trainer(), stage.episodes(), run.engine)
    num_rollbacks = 0
    try:
        version = await actors.open()
        while True:
            try:
                steps = await train_from(version, stage, ledger, actors, is_resumed=is_resumed)
                policy = await actors.export(str(stage.folder / "policy"), manifest["parents"])
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
        write_json(stage.folder / MANIFEST, manifest | facts)
    finally:
        await actors.close()


async def train_from(version: int, stage: Stage, ledger: Ledger, actors: RayActors, *, is_resumed: bool) -> int:
    """The loop from a checkpoint to the end; returns how many optimizer steps the policy has taken.

    Raises:
        ActorGone: the trainer died.
    """
    run = stage.run
    restored = ledger.load_checkpoint(version)
    if is_resumed:
        logger.info(
            "Resumed at version %d: %d slots of later steps are ready again, %d attempts were in flight",
            version, len(restored.returned), len(restored.abandoned),
        )  # fmt: skip
    mode = WandbMode[run.wandb]
    with (
        MetricLogger(stage.folder, mode=mode, resumed_from=version if is_resumed else None) as metrics,
        Progress(stage.verb, run.max_steps, done=version) as progress,
    ):

        def log(values: dict[str, float], step: int) -> None:
            metrics.log(values, step=step, policy_version=step)
            if stage.shown in values:
                progress.advance(step - progress.done, **{stage.shown.split("/")[-1]: values[stage.shown]})

        controller = Controller(run, stage.pacing, stage.order, stage.form, ledger, actors, log, version)
        await controller.run()
        for name, counters in (await actors.stats()).items():
            log({f"{name}/{key}": value for key, value in counters.items()}, controller.version)
    return controller.version


def check_policy(run: ActingRun) -> Tokenizer:
    """The start policy can be read and takes the longest trajectory; returns its tokenizer.

    Raises:
        UserError, ValueError: what is wrong, and where.
    """
    context = load_config(Path(run.policy)).max_position_embeddings
    longest = run.episode.max_context_tokens
    if longest > context:
        raise UserError(f"episode.max_context_tokens={longest} is more than the policy's context of {context}")
    return check_fits(Path(run.policy), run.encoding.system_token_id)


def check_prompts(run: ActingRun | EvalRun, tasks: Sequence[Task], harness: Harness, tokenizer: Tokenizer) -> None:
    """Every task leaves room for an answer.

    Raises:
        UserError: naming the first one that does not.
    """
    longest = run.episode.max_context_tokens
    for task in tasks:
        prompt = len(Conversation(tokenizer, run.encoding).append(harness.opening(task)))
        if prompt >= longest:
            raise UserError(f"{task.where}: its prompt has {prompt} tokens, episode.max_context_tokens is {longest}")


def schedule_of(run: ActingRun) -> TrainConfig:
    """The learning rate schedule over the whole run."""
    train = run.train
    if train.decay_steps:
        # the length of the run is known here, and a decay without it would silently not happen
        return replace(train, total_steps=train.total_steps or run.max_steps)
    return train
