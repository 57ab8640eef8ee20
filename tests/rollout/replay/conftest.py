"""An RL run folder made by the run's own parts in this process: episodes, an engine that swaps weights in the middle of a
turn, token logs, ledger, published versions. What Ray would add is only where they run.

The policy is untrained and says anything, so its machines are in memory: nothing it says reaches a real shell.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fakes import MemorySandboxes

from burnish.configs.config import Kind, NewRun
from burnish.configs.scaffold import new_task
from burnish.configs.schema import to_yaml
from burnish.envs.taskset import load_taskset
from burnish.policy.checkpoint.lineage import policy_hash
from burnish.policy.checkpoint.released import load_policy
from burnish.policy.config import InitRun
from burnish.policy.encoding.tokenizer import check_fits
from burnish.policy.inference.config import EngineConfig
from burnish.policy.initialize import main as initialise
from burnish.rollout.config import AlgoConfig, ClusterConfig, EpisodeConfig, RlRun, SamplingConfig
from burnish.rollout.generator import open_engine
from burnish.rollout.ledger import Ledger
from burnish.rollout.replay import verdict
from burnish.rollout.rollouts import slots_of_pass
from burnish.rollout.run_folder import Parent, claim
from burnish.rollout.train import episode_settings
from burnish.rollout.weight_sync import check_receipt, publish
from burnish.rollout.worker import EpisodeRunner


@dataclass
class Played:
    """A run with three groups of two: the first under version 0, the second across the swap, the third under version 1."""

    folder: Path
    run: RlRun

    def slot(self, group: int, member: int = 0) -> str:
        return f"000-{group:06d}-{member:03d}"


def make_run(folder: Path, *, deterministic: bool, **sampling: float) -> Played:
    for word in ("amber", "falcon", "river"):
        new_task(NewRun(kind=Kind.task, name=word, out=str(folder / "tasks")))
        (folder / "tasks" / word / "instruction.md").write_text(f"write {word} to {word}.txt\n")
    initialise(InitRun(out=str(folder / "policy"), preset="tiny", seed=3))
    run = RlRun(
        tasks=str(folder / "tasks"),
        policy=str(folder / "policy"),
        runs=str(folder),
        name="run",
        verifier="fakes:EchoVerifier",
        algo=AlgoConfig(group_size=2),
        sampling=SamplingConfig(**sampling),
        episode=EpisodeConfig(max_turns=2, max_turn_tokens=9, max_context_tokens=200),
        engine=EngineConfig(num_pages=64, max_contexts=8, max_running=8, max_step_rows=64, deterministic=deterministic),
        cluster=ClusterConfig(episodes_per_worker=4),
    )
    tasks = load_taskset(folder / "tasks")
    parents = {
        "policy": Parent(hash=policy_hash(folder / "policy"), path=run.policy),
        "tasks": Parent(hash=tasks.content_hash, path=run.tasks),
    }
    claim(folder / "run", stage="rl", parents=parents, settings=to_yaml(run), is_resumed=False)
    asyncio.run(play(folder / "run", run, tasks))
    return Played(folder=folder / "run", run=run)


async def play(run_dir: Path, run: RlRun, tasks) -> None:
    models = [load_policy(Path(run.policy)) for _ in range(2)]
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    never = check_fits(Path(run.policy)).never_written()
    loop = open_engine(Path(run.policy), run.engine.reserving(never), "generator-0")
    by_id = {task.id: task for task in tasks.tasks}
    runner = EpisodeRunner(episode_settings(run, run_dir), by_id, MemorySandboxes(), loop)
    ledger = Ledger(run_dir / "ledger.sqlite")
    ledger.load_checkpoint(0)
    ledger.add_slots(slots := slots_of_pass(tasks.tasks, 0, run.algo.group_size, "none", run.seed))
    publish(models[0].state_dict(), 0, run_dir / "weights")

    async def episode(slot, version):
        attempt_id = ledger.open_attempt(slot.slot_id)
        ledger.close_attempt(await runner.play(slot, attempt_id, version))

    async def swap(after: int):
        while (await loop.stats())["sampled"] < after:
            await asyncio.sleep(0.0005)
        manifest = publish(models[1].state_dict(), 1, run_dir / "weights")
        check_receipt(await loop.update_weights(manifest), manifest)

    await asyncio.gather(*(episode(slot, 0) for slot in slots if slot.group_index == 0))
    sampled = (await loop.stats())["sampled"]
    await asyncio.gather(*(episode(slot, 0) for slot in slots if slot.group_index == 1), swap(sampled + 10))
    await asyncio.gather(*(episode(slot, 1) for slot in slots if slot.group_index == 2))
    await runner.close()
    loop.close()
    ledger.close()


@pytest.fixture
def memory_machines(monkeypatch):
    """Commands that are played again run where they were played."""
    monkeypatch.setattr(verdict, "open_machines", lambda run: MemorySandboxes())


@pytest.fixture(scope="package")
def exact_run(tmp_path_factory) -> Played:
    """Deterministic; nothing may change it."""
    return make_run(tmp_path_factory.mktemp("exact"), deterministic=True)


@pytest.fixture(scope="package")
def cut_run(tmp_path_factory) -> Played:
    """Not deterministic, with a temperature and kept sets; nothing may change it."""
    return make_run(tmp_path_factory.mktemp("cut"), deterministic=False, temperature=0.8, top_p=0.9)


@pytest.fixture
def played(exact_run, tmp_path) -> Played:
    """A copy of the deterministic run, to be damaged."""
    import shutil

    shutil.copytree(exact_run.folder, tmp_path / "run")
    return Played(folder=tmp_path / "run", run=exact_run.run)
