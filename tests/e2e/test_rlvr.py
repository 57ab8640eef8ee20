"""RL on prompts from a file, without a sandbox: a tiny policy learns, bit for bit again, and goes on after a kill.

Everything is real but the borders between processes: the actors of a run are called here in one process, which starts
in a second. One run goes through the command line and Ray.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from burnish.envs.prompts.config import PromptData
from burnish.policy.config import InitRun
from burnish.policy.initialize import main as initialise
from burnish.policy.training.config import TrainConfig
from burnish.policy.training.distributed import shutdown
from burnish.policy.training.metrics import read_metrics
from burnish.rollout import actors as actor_classes
from burnish.rollout import cluster, train
from burnish.rollout.actors import GeneratorActor, TrainerActor, WorkerActor
from burnish.rollout.audit import audit
from burnish.rollout.config import AlgoConfig, ClusterConfig, EpisodeConfig, RlRun, Schedule
from burnish.rollout.ray_actors import RayActors
from burnish.verifiers.config import GradingConfig

BURNISH = Path(sys.executable).with_name("burnish")
TESTS = Path(__file__).parents[1]
NOWHERE = "unix:///nowhere"


class Killed(BaseException):
    """The driver's process is gone at this instant."""


class Handle:
    """An actor as its callers hold it; a call of its method is answered by the object itself."""

    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, method):
        async def call(*args):
            answer = getattr(self._actor, method)(*args)
            return await answer if asyncio.iscoroutine(answer) else answer

        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(call(*args)))


class ActorsHere:
    """The actors of a run in this process, behind the interface of RayActors."""

    kill_at_save = 0

    def __init__(self, config, trainer, episodes, engine):
        self.num_saves = 0
        self.generator = GeneratorActor("generator-0", trainer.policy, engine, 1)
        self.trainer = TrainerActor(trainer, 1)
        self.worker = WorkerActor("worker-0", episodes, {"generator-0": Handle(self.generator)})
        for name in ("play", "cancel"):
            setattr(self, name, getattr(self.worker, name))

    async def open(self):
        version = self.trainer.open()
        await self.generator.open()
        assert await self.worker.open() == "none", "the worker has sandboxes"
        return version

    async def train(self, request_id, items):
        return self.trainer.train(request_id, items)

    async def mismatch(self, items):
        return self.trainer.mismatch(items)

    async def save(self):
        self.num_saves += 1
        if self.num_saves == self.kill_at_save:
            raise Killed
        return self.trainer.save()

    async def publish(self):
        return self.trainer.publish()

    async def swap(self, manifest):
        return [await self.generator.update_weights(manifest)]

    async def stats(self):
        return {"generator-0": await self.generator.stats()}

    async def export(self, folder, parents):
        return self.trainer.export(folder, parents)

    async def close(self):
        await self.worker.close()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rlvr") / "policy"
    initialise(InitRun(out=str(folder), seed=1))
    yield str(folder)
    shutdown()


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {word}", "answer": "e"}) + "\n" for word in "abcdefgh"))
    return str(path)


@pytest.fixture
def in_one_process(monkeypatch):
    """No Ray, and whoever asks for a sandbox or an engine is told."""

    def refuse(*args, **kwargs):
        raise AssertionError("a sandbox was asked for")

    real = RayActors
    for module in list(sys.modules.values()):
        if getattr(module, "RayActors", None) is real:
            monkeypatch.setattr(module, "RayActors", ActorsHere)
    monkeypatch.setattr(cluster, "start", lambda config: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr(actor_classes, "name_process", lambda name: None)
    monkeypatch.setattr("burnish.rollout.sources.open_sandboxes", refuse)
    monkeypatch.setenv("DOCKER_HOST", NOWHERE)
    monkeypatch.setattr(ActorsHere, "kill_at_save", 0)


def settings(prompts, policy, runs, **changes) -> RlRun:
    fields = {
        "data": PromptData(path=prompts),
        "verifier": "reward_functions:contains",
        "policy": policy,
        "runs": str(runs),
        "name": "run",
        "schedule": Schedule["lockstep"],
        "algo": AlgoConfig(group_size=4, groups_per_step=4, max_offpolicy_steps=0),
        "episode": EpisodeConfig(max_turn_tokens=1, max_context_tokens=48),
        "cluster": ClusterConfig(episodes_per_worker=16),
        "train": TrainConfig(lr=1e-2, weight_decay=0.0),
        "grading": GradingConfig(processes=2),
        "max_steps": 8,
        "checkpoint_every": 4,
        "wandb": "disabled",
    }
    run = RlRun(**fields | changes)
    run.engine.deterministic = True
    return run


def digest(run: Path) -> str:
    return json.loads((run / "manifest.json").read_text())["policy"]


def losses(run: Path) -> dict[int, float]:
    return {r["step"]: r["train/loss"] for r in read_metrics(run / "metrics.jsonl") if "train/loss" in r}


def test_a_tiny_policy_learns_again_bit_for_bit_and_after_a_kill(prompts, policy, tmp_path, in_one_process):
    first = tmp_path / "a" / "run"
    assert train.main(settings(prompts, policy, tmp_path / "a")) == 0
    rewards = [r["rollout/reward"] for r in read_metrics(first / "metrics.jsonl") if "rollout/reward" in r]
    assert sum(rewards[-2:]) > 1.5 * sum(rewards[:2]), rewards
    report = audit(first)
    assert report.is_clean, report.violations
    assert report.facts["optimizer steps"] == 8

    # the same settings, killed while the state of step 8 is saved, and gone on with: from step 4, by the same steps
    second = tmp_path / "b" / "run"
    ActorsHere.kill_at_save = 2
    with pytest.raises(Killed):
        train.main(settings(prompts, policy, tmp_path / "b"))
    assert not (second / "policy").exists()
    ActorsHere.kill_at_save = 0
    assert train.main(RlRun(resume=str(second))) == 0
    assert audit(second).is_clean
    assert digest(second) == digest(first)
    assert losses(second) == losses(first)
    assert len(losses(first)) == 8

    # other prompts under the same name are another set
    Path(prompts).write_text(Path(prompts).read_text() + json.dumps({"prompt": "say i", "answer": "e"}) + "\n")
    with pytest.raises(ValueError, match=r"prompts.jsonl has changed since .*: tasks has another hash"):
        train.main(RlRun(resume=str(second)))


def test_rewards_that_are_none_train_nothing(prompts, policy, tmp_path, in_one_process):
    run = settings(prompts, policy, tmp_path / "a", verifier="reward_functions:raising", max_steps=1)
    with pytest.raises(RuntimeError, match="episodes in a row failed, the last with verifier_failed"):
        train.main(run)
    assert not losses(tmp_path / "a" / "run")
    report = audit(tmp_path / "a" / "run")
    assert report.is_clean, report.violations
    assert report.attempts["verifier_failed"] >= 16


@pytest.mark.slow
def test_the_command_line_trains_on_prompts_without_an_engine(prompts, policy, tmp_path):
    words = [
        "rl", f"data.path={prompts}", "verifier=reward_functions:contains", f"policy={policy}", "name=run", "max_steps=1",
        "wandb=disabled", "sandbox=docker", "algo.group_size=4", "algo.groups_per_step=2", "cluster.episodes_per_worker=8",
        "episode.max_turn_tokens=6", "episode.max_context_tokens=48", "data.heldout_fraction=0.3",
    ]  # fmt: skip
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, "DOCKER_HOST": NOWHERE}
    done = subprocess.run([str(BURNISH), *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sandboxes: none" in done.stderr
    assert audit(tmp_path / "runs" / "run").is_clean
    assert (tmp_path / "runs" / "run" / "policy" / "model.safetensors").is_file()
