"""A tiny student, two teachers near it that are surer of themselves, and what the student said under its own engine."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import torch

from burnish.distill.config import DistillAlgoConfig, HealthConfig
from burnish.distill.settings import DistillerSettings
from burnish.distill.specialist import Teacher
from burnish.policy.checkpoint.lineage import policy_hash
from burnish.policy.checkpoint.released import load_policy, save_policy
from burnish.policy.config import InitRun
from burnish.policy.encoding.config import EncodingConfig
from burnish.policy.encoding.conversation import Conversation
from burnish.policy.encoding.messages import Message, Role
from burnish.policy.encoding.tokenizer import load_tokenizer
from burnish.policy.inference.config import EngineConfig
from burnish.policy.initialize import main as initialise
from burnish.policy.training.config import TrainConfig
from burnish.rollout.agents import PolicyAgent
from burnish.rollout.config import EpisodeConfig, SamplingConfig
from burnish.rollout.generator import open_engine
from burnish.rollout.token_log import TokenLog
from burnish.rollout.types import BlockRef

TEACHERS = ("coding", "terminal")
NUM_ROLLOUTS = 6


def make_policies(folder: Path) -> None:
    """student, coding, terminal: policy folders. A fresh policy is all but uniform; larger heads have opinions."""
    initialise(InitRun(out=str(folder / "fresh"), preset="tiny", seed=3))
    for number, name in enumerate(("student", *TEACHERS)):
        model = load_policy(folder / "fresh")
        torch.manual_seed(number)
        with torch.no_grad():
            model.head.weight *= 6
            if name != "student":
                for parameter in model.parameters():
                    parameter += 0.006 * torch.randn_like(parameter)
        save_policy(model, folder / name, side_files_from=folder / "fresh")


def teacher_of(folder: Path, name: str, **changes) -> Teacher:
    values = {
        "name": name, "policy": str(folder / name), "hash": policy_hash(folder / name), "weight": 1.0, "width": 96,
        "vocab_size": 1024,
    }  # fmt: skip
    return Teacher(**values | changes)


@dataclass(frozen=True)
class World:
    """Policies and the blocks of rollouts that the student played."""

    folder: Path
    rollouts: tuple[tuple[BlockRef, ...], ...]

    def settings(self, **changes) -> DistillerSettings:
        values = {
            "stage": "distill",
            "policy": str(self.folder / "student"),
            "blocks": str(self.folder / "blocks"),
            "checkpoints": str(self.folder / "checkpoints"),
            "weights": str(self.folder / "published"),
            "train": TrainConfig(lr=2e-4, weight_decay=0.0),
            "temperature": 1.0,
            "reserved_ids": (),
            "tokens_per_micro_batch": 256,
            "deterministic": True,
            "algo": DistillAlgoConfig(),
            "teachers": {name: teacher_of(self.folder, name) for name in TEACHERS},
            "health": HealthConfig(),
            "cache": str(self.folder / "teacher-states"),
            "cache_bytes": 2**30,
            "num_ids": 1024,
        }
        return DistillerSettings(**values | changes)


async def play(folder: Path) -> tuple[tuple[BlockRef, ...], ...]:
    tokenizer = load_tokenizer(folder / "student")
    loop = open_engine(folder / "student", EngineConfig(deterministic=True, max_step_rows=64), "generator-0")

    async def episode(number: int) -> tuple[BlockRef, ...]:
        agent = PolicyAgent(
            attempt_id=f"a-{number}",
            conversation=Conversation(tokenizer, EncodingConfig()),
            engine=loop,
            log=TokenLog(folder / "blocks", f"a-{number}"),
            sampling=SamplingConfig(),
            budget=EpisodeConfig(max_turn_tokens=12, max_context_tokens=200),
            seed=number,
            eos=tokenizer.special.eos,
        )
        for turn in range(2):
            text = "write amber to out.txt " * (1 + number % 3) if turn == 0 else f"<output>\n{'x ' * number}</output>"
            agent.hear(Message(role=Role.user, content=text))
            await agent.speak(deadline=1e12)
        await agent.release()
        return agent.finish()[1]

    refs = await asyncio.gather(*(episode(number) for number in range(NUM_ROLLOUTS)))
    loop.close()
    return tuple(refs)
