"""The loop with a scripted engine and a trainer of a few lines: order, staleness, failures, and a kill at every call."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fakes import MemorySandboxes, ScriptedEngine

from burnish.envs.config import SandboxConfig, SandboxKind
from burnish.envs.sandbox.base import SandboxError
from burnish.envs.task import Task, TaskConfig
from burnish.policy.encoding.config import EncodingConfig
from burnish.policy.encoding.subvocabulary import tiny_tokenizer
from burnish.policy.inference.config import EngineConfig
from burnish.policy.training.metrics import MetricLogger, WandbMode
from burnish.rollout.agents import sampling_seed
from burnish.rollout.audit import audit
from burnish.rollout.batch import StepResult, former_of
from burnish.rollout.blocks import read_block
from burnish.rollout.config import Agent, AlgoConfig, ClusterConfig, EpisodeConfig, RlRun, SamplingConfig, Schedule
from burnish.rollout.controller import Controller
from burnish.rollout.generator import EngineLoop
from burnish.rollout.guard import GuardTripped
from burnish.rollout.ledger import Ledger
from burnish.rollout.rollouts import order_of
from burnish.rollout.settings import EpisodeSettings
from burnish.rollout.types import Disposition, RolloutError
from burnish.rollout.weight_sync import Receipt, WeightManifest, WeightSyncError
from burnish.rollout.worker import EpisodeRunner

WORDS = ("amber", "falcon", "cloud", "river", "stone", "field", "light", "paper")


class Killed(BaseException):
    """The driver's process is gone at this instant."""


def make_tasks(count: int) -> list[Task]:
    return [
        Task(
            id=f"write-{i:02d}",
            path=Path(f"write-{i:02d}"),
            instruction=f"write {WORDS[i % len(WORDS)]} to out.txt",
            config=TaskConfig(artifacts=("/app/out.txt",)),
            content_hash=str(i),
        )
        for i in range(count)
    ]


def skilled(ids: list[int], sampling, version: int) -> list[int]:
    """Does what the prompt asks with a chance that grows with the version; which time is up to the slot's seed."""
    tokenizer = tiny_tokenizer()
    special = tokenizer.special
    turn = ids.count(special.assistant) - 1
    word = tokenizer.decode(ids[2 : ids.index(special.assistant)]).split()[1]
    knows = random.Random(sampling.seed).random() < 0.4 + 0.1 * version
    text = f"echo {word} > out.txt" if knows and turn == 0 else "exit"
    return [*tokenizer.encode(text), special.eos]


@dataclass
class LocalActors:
    """All actors in this process: the real episode runner, a scripted engine, and a trainer that counts.

    Its training state is on disk, as the real one's: what was trained since the last `save` dies with it.
    """

    folder: Path
    runner: EpisodeRunner
    loop: EngineLoop
    version: int = 0
    trained: list[list[str]] = field(default_factory=list)
    """Attempts of each step of the lineage."""
    calls: int = 0
    kill_at: int = -1
    on_kill: object = None
    batches: list = field(default_factory=list)

    def load(self) -> int:
        states = sorted(self.folder.glob("checkpoints/step-*/state.json"), key=lambda p: int(p.parent.name[5:]))
        if states:
            state = json.loads(states[-1].read_text())
            self.version, self.trained = state["num_steps"], state["trained"]
        return self.version

    def count(self) -> None:
        self.calls += 1
        if self.calls == self.kill_at:
            self.on_kill()
        if 0 < self.kill_at <= self.calls:
            raise Killed

    async def play(self, slot, attempt_id, policy_version):
        self.count()
        trajectory = await self.runner.play(slot, attempt_id, policy_version)
        self.count()
        return trajectory

    async def cancel(self, attempt_ids):
        self.count()
        await self.runner.cancel(attempt_ids)

    async def train(self, request_id, items):
        self.count()
        self.version += 1
        self.trained.append([item.blocks[0].attempt_id for item in items])
        self.batches.append(items)
        await asyncio.sleep(0.01)
        self.count()
        return StepResult(
            metrics={"train/loss": 0.0, "train/slots": float(len(items))},
            is_skipped=False,
            version=self.version,
            trained_tokens=(),
        )

    async def mismatch(self, items):
        self.count()
        return {"mismatch_kl": 0.0}

    async def save(self):
        self.count()
        folder = self.folder / "checkpoints" / f"step-{self.version}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"num_steps": self.version, "trained": self.trained}))
        self.count()
        return f"checkpoints/step-{self.version}"

    async def publish(self):
        self.count()
        return WeightManifest(
            version=self.version, folder="", checksums={}, digest=f"d{self.version}", size_bytes=0, seconds=0
        )

    async def swap(self, manifest):
        self.count()
        await self.loop._command(lambda: self.loop._engine.update_weights({}, manifest.version))
        return [Receipt(generator="generator-0", version=manifest.version, digest=manifest.digest, seconds=0.0)]


def settings(**changes) -> RlRun:
    algo = {"group_size": 3, "groups_per_step": 2, "max_offpolicy_steps": 1} | changes.pop("algo", {})
    return RlRun(
        algo=AlgoConfig(**algo),
        cluster=ClusterConfig(episodes_per_worker=changes.pop("running", 9)),
        episode=EpisodeConfig(max_turns=3, max_turn_tokens=16, max_context_tokens=120),
        engine=EngineConfig(),
        **{"max_steps": 4, "checkpoint_every": 2, "verifier": "fakes:EchoVerifier"} | changes,
    )


def start(run: RlRun, folder: Path, tasks, *, reply=skilled, sandboxes=None, step_s=0.0, log=lambda values: None):
    """Everything of a run that a new driver process makes; returns the controller and its parts."""
    tiny_tokenizer().save(folder)
    engine = ScriptedEngine(reply, step_s=step_s)
    loop = EngineLoop(engine, "generator-0")
    episodes = EpisodeSettings(
        run_id="test",
        agent=Agent.policy,
        tasks="",
        policy=str(folder),
        blocks=str(folder / "blocks"),
        harness="bash",
        verifier=run.verifier,
        sandbox=SandboxKind.local,
        limits=SandboxConfig(),
        episode=run.episode,
        encoding=EncodingConfig(),
        sampling=SamplingConfig(),
        seed=run.seed,
        concurrency=9,
    )
    runner = EpisodeRunner(episodes, {task.id: task for task in tasks}, sandboxes or MemorySandboxes(), loop)
    actors = LocalActors(folder, runner, loop)
    ledger = Ledger(folder / "ledger.sqlite")
    version = actors.load()
    ledger.load_checkpoint(version)
    metrics = MetricLogger(folder, mode=WandbMode.disabled, resumed_from=version)

    def write(values, step):
        metrics.log(values, step=step, policy_version=step)
        log(values)

    order = order_of(tasks, run.algo.group_size, "none", run.seed)
    controller = Controller(run, run.algo, order, former_of(run, folder / "blocks"), ledger, actors, write, version)
    return controller, actors, ledger, engine


def run_to_end(run: RlRun, folder: Path, tasks, **parts):
    controller, actors, ledger, engine = start(run, folder, tasks, **parts)
    try:
        asyncio.run(finish(controller, actors))
    finally:
        ledger.close()
    return controller, actors, engine


async def finish(controller, actors):
    try:
        await controller.run()
    finally:
        await actors.runner.close()
        actors.loop.close()


def versions_of(actors) -> list[set[int]]:
    """Versions of the sampled tokens of each step."""
    blocks = actors.folder / "blocks"
    return [
        {int(v) for item in items for ref in item.blocks for v in read_block(blocks, ref).version_T if v >= 0}
        for items in actors.batches
    ]


def test_lockstep_trains_each_slot_with_the_version_that_sampled_it_and_repeats_bit_for_bit(tmp_path):
    run = settings(schedule=Schedule.lockstep, algo={"max_offpolicy_steps": 0})
    seen = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        _, actors, _ = run_to_end(run, tmp_path / name, make_tasks(5))
        assert versions_of(actors) == [{0}, {1}, {2}, {3}]
        seen.append(
            [[(item.advantage, [ref.digest for ref in item.blocks]) for item in items] for items in actors.batches]
        )
        assert audit(tmp_path / name).is_clean, audit(tmp_path / name).violations
    assert seen[0] == seen[1]


def test_asynchronous_episodes_run_ahead_and_no_token_is_older_than_allowed(tmp_path):
    _, actors, _ = run_to_end(settings(max_steps=6), tmp_path, make_tasks(8), step_s=0.001)
    ages = [step - min(versions) for step, versions in enumerate(versions_of(actors))]
    assert max(ages) == 1, f"ages {ages}: the schedule never ran ahead, or too far"
    report = audit(tmp_path)
    assert report.is_clean, report.violations
    assert len({attempt for step in actors.trained for attempt in step}) == sum(map(len, actors.trained))


def test_groups_without_variance_are_dropped_with_the_reason_and_are_in_no_step(tmp_path):
    def decided(ids, sampling, version):
        """Always solves `amber`, never the others."""
        text = tiny_tokenizer().decode(ids)
        done = ids.count(tiny_tokenizer().special.assistant) > 1
        reply = "echo amber > out.txt" if "amber" in text and not done else "exit"
        return [*tiny_tokenizer().encode(reply), tiny_tokenizer().special.eos]

    controller, actors, _ = run_to_end(settings(passes=1), tmp_path, make_tasks(5), reply=decided)
    assert controller.version == 0
    assert actors.batches == []
    report = audit(tmp_path)
    assert report.slots == {"dropped (zero_variance)": 15}
    assert report.is_clean, report.violations


def test_the_run_ends_cleanly_when_the_data_is_used_up(tmp_path):
    # 5 prompts, batches of 2: two full batches and one of what is left
    controller, actors, _ = run_to_end(settings(max_steps=50, passes=1), tmp_path, make_tasks(5))
    assert controller.version == len(actors.batches) <= 3
    assert audit(tmp_path).slots.get("pending", 0) == 0
    assert audit(tmp_path).slots.get("ready", 0) == 0
    assert audit(tmp_path).is_clean


def test_nothing_is_started_that_no_step_could_consume(tmp_path):
    _, _, engine = run_to_end(settings(max_steps=1, algo={"max_offpolicy_steps": 4}), tmp_path, make_tasks(8))
    attempts = {request_id.split(".")[0] for request_id, _, _ in engine.requests}
    # a batch of two groups of three; more only where one of them had no variance
    assert len(attempts) % 6 == 0
    assert len(attempts) <= 24


def test_an_infrastructure_failure_is_tried_again_and_never_scored(tmp_path):
    _, actors, _ = run_to_end(settings(max_steps=2), tmp_path, make_tasks(4), sandboxes=MemorySandboxes(fail_first=4))
    report = audit(tmp_path)
    assert report.attempts["infra_failed"] == 4
    assert report.is_clean, report.violations
    failed = {attempt for step in actors.trained for attempt in step if attempt.endswith("-01")}
    assert failed, "the second try of a slot was trained"


def test_a_slot_that_always_fails_leaves_its_group_smaller(tmp_path):
    class Picky(MemorySandboxes):
        def create(self, task, *, role, run_id, attempt_id):
            if attempt_id.startswith("000-000000-001"):
                raise SandboxError("no space left on device")
            return super().create(task, role=role, run_id=run_id, attempt_id=attempt_id)

    run = settings(max_steps=1, passes=1, algo={"groups_per_step": 1})
    _, actors, _ = run_to_end(run, tmp_path, make_tasks(1), sandboxes=Picky(), reply=by_member)
    report = audit(tmp_path)
    assert report.slots == {"dropped (too_many_attempts)": 1, "trained": 2}
    advantages = sorted(item.advantage for item in actors.batches[0])
    assert advantages == [-0.5, 0.5], "the failed member moved nobody's baseline"


def by_member(ids, sampling, version):
    """Only the first member of a group solves its task."""
    tokenizer = tiny_tokenizer()
    is_first_turn = ids.count(tokenizer.special.assistant) == 1
    is_solver = sampling.seed == sampling_seed(0, "000-000000-000")
    return [*tokenizer.encode("echo amber > out.txt" if is_solver and is_first_turn else "exit"), tokenizer.special.eos]


def test_failures_without_end_stop_the_run_before_the_data_is_burnt(tmp_path):
    with pytest.raises(RolloutError, match=r"12 episodes in a row failed.*no space left on device"):
        run_to_end(settings(), tmp_path, make_tasks(8), sandboxes=MemorySandboxes(fail_first=10_000))
    assert audit(tmp_path).slots.get("dropped (too_many_attempts)", 0) < 12
    assert audit(tmp_path).is_clean


def test_a_generator_that_acknowledges_another_version_is_fenced(tmp_path):
    controller, actors, ledger, _ = start(settings(), tmp_path, make_tasks(4))
    swap = actors.swap

    async def stuck(manifest):
        return [Receipt(generator="generator-0", version=0, digest=r.digest, seconds=0) for r in await swap(manifest)]

    actors.swap = stuck
    with pytest.raises(WeightSyncError, match="acknowledges policy version 0, published is 1"):
        asyncio.run(finish(controller, actors))
    ledger.close()


def test_an_engine_that_disagrees_with_the_trainer_is_not_trained_on(tmp_path):
    controller, actors, ledger, _ = start(settings(), tmp_path, make_tasks(4))

    async def off(items):
        return {"mismatch_kl": 0.3}

    actors.mismatch = off
    with pytest.raises(RolloutError, match=r"mean KL 0\.3 .* gate_max_kl is 0\.01"):
        asyncio.run(finish(controller, actors))
    assert actors.batches == []
    ledger.close()


def test_permuted_rewards_are_the_same_rewards_on_other_rollouts(tmp_path):
    run = settings(max_steps=3, algo={"permute_rewards": True, "group_size": 6})
    logged: list[dict] = []
    _, actors, _ = run_to_end(run, tmp_path, make_tasks(6), log=logged.append)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    trained = [t for step in actors.batches for t in step]
    signs = Counter(
        (item.advantage > 0) == (ledger.trajectory(item.blocks[0].attempt_id).reward > 0.5) for item in trained
    )
    ledger.close()
    assert signs[False] > len(trained) / 5, "advantages still follow the rewards"
    assert any("rollout/reward" in values for values in logged)


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_killed_at_every_call_and_resumed_every_slot_is_accounted_for_once(tmp_path, schedule):
    """Restart at every await point: what is trained in the lineage is each slot once, whatever instant the kill hits."""
    is_lockstep = schedule == "lockstep"
    run = settings(
        schedule=Schedule[schedule],
        max_steps=3,
        algo={"group_size": 2, "max_offpolicy_steps": 0 if is_lockstep else 1},
    )
    tasks = make_tasks(6)
    (tmp_path / "whole").mkdir()
    _, whole, _ = run_to_end(run, tmp_path / "whole", tasks)
    num_calls = whole.calls
    for kill_at in range(1, num_calls, 2 if num_calls < 80 else 3):
        folder = tmp_path / f"kill-{kill_at}"
        folder.mkdir()
        controller, actors, ledger, _ = start(run, folder, tasks)
        actors.kill_at, actors.on_kill = kill_at, ledger.close
        with pytest.raises((Killed, Exception)):
            asyncio.run(finish(controller, actors))
        ledger.close()
        controller, actors, _ = run_to_end(run, folder, tasks)
        report = audit(folder)
        assert report.is_clean, f"killed at call {kill_at}: {report.violations}"
        assert controller.version == 3
        lineage = [attempt for step in actors.trained for attempt in step]
        slots = [attempt.rpartition("-")[0] for attempt in lineage]
        assert len(set(slots)) == len(slots), f"killed at call {kill_at}: a slot was trained twice"
        # a resume can leave more complete groups than could be trained in time: what is too old is masked, not lost
        counts = controller_counts(folder)
        used = counts[Disposition.trained] + counts[Disposition.masked]
        assert used == len(slots), f"killed at call {kill_at}: {counts}, in steps {len(slots)}"
        if is_lockstep:
            assert slots == [a.rpartition("-")[0] for step in whole.trained for a in step], f"killed at call {kill_at}"


def controller_counts(folder: Path):
    ledger = Ledger(folder / "ledger.sqlite")
    try:
        return ledger.counts()
    finally:
        ledger.close()


def test_a_group_that_never_gets_a_reward_is_dropped_and_the_run_goes_on(tmp_path):
    class Broken(MemorySandboxes):
        def create(self, task, *, role, run_id, attempt_id):
            if attempt_id.startswith("000-000000-"):
                raise SandboxError("no space left on device")
            return super().create(task, role=role, run_id=run_id, attempt_id=attempt_id)

    run = settings(max_steps=1, passes=3, algo={"groups_per_step": 1})
    logged: dict[str, float] = {}
    controller, _, _ = run_to_end(run, tmp_path, make_tasks(4), sandboxes=Broken(), log=logged.update)
    report = audit(tmp_path)
    assert controller.version == 1
    assert report.slots["dropped (too_many_attempts)"] == 3
    assert logged["rollout/failed/infra_failed"] == 9
    assert report.is_clean, report.violations


def test_rollouts_of_a_killed_driver_say_up_to_which_version_its_weights_were_ours(tmp_path):
    controller, actors, ledger, _ = start(settings(), tmp_path, make_tasks(6))

    async def die():
        raise Killed

    actors.save = die  # at step 2: what was trained dies with the driver
    with pytest.raises((Killed, Exception)):
        asyncio.run(finish(controller, actors))
    ledger.close()
    controller, actors, _ = run_to_end(settings(), tmp_path, make_tasks(6))
    items = [item for items in actors.batches for item in items]
    slots = [item.blocks[0].attempt_id.rpartition("-")[0] for item in items]
    assert 0 < sum(slot in controller.rollouts.restored for slot in slots) < len(slots)
    for slot, item in zip(slots, items, strict=True):
        assert item.shared_version == (0 if slot in controller.rollouts.restored else None)


def test_steps_that_are_never_finite_end_the_run(tmp_path):
    controller, actors, ledger, _ = start(settings(max_steps=3, passes=50), tmp_path, make_tasks(6))

    async def skip(request_id, items):
        return StepResult(metrics={}, is_skipped=True, version=0, trained_tokens=())

    actors.train = skip
    with pytest.raises(RolloutError, match="10 steps in a row were not finite"):
        asyncio.run(finish(controller, actors))
    ledger.close()
    report = audit(tmp_path)
    assert report.slots["dropped (step_not_finite)"] >= 10 * 3
    assert report.is_clean, report.violations


def test_an_unknown_wandb_mode_is_found_before_anything_runs():
    with pytest.raises(ValueError, match="wandb must be one of auto"):
        settings(wandb="sometimes")


def test_a_guard_rule_pauses_the_run_with_its_state_saved(tmp_path):
    run = settings(max_steps=4, checkpoint_every=3, guard=["train/loss > -1 for 2: pause"])
    controller, actors, ledger, _ = start(run, tmp_path, make_tasks(8))
    with pytest.raises(GuardTripped, match="holds since policy version 1"):
        asyncio.run(finish(controller, actors))
    ledger.close()
    assert controller.version == controller.saved_version == 2
    report = audit(tmp_path)
    assert report.is_clean, report.violations
