"""A tiny policy with fresh weights, and a data file of oracle trajectories in the synthesis' own form."""

import json
import random
from pathlib import Path

import pytest

from burnish.envs.config import Domain
from burnish.envs.synthesis.generate import families_of, generate
from burnish.envs.synthesis.transcript import RecordedTurn, messages
from burnish.policy.checkpoint.released import save_policy
from burnish.policy.encoding.subvocabulary import tiny_tokenizer
from burnish.policy.model.transformer import Transformer
from burnish.policy.presets import preset


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    side = folder / "side"
    side.mkdir()
    tiny_tokenizer().save(side)
    model = Transformer(preset("tiny"))
    model.reset_parameters(0)
    return save_policy(model, folder / "base", side_files_from=side)


@pytest.fixture(scope="session")
def oracle_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "oracle-train.jsonl"
    chance, families = random.Random(0), families_of(Domain.terminal)
    with path.open("w") as file:
        for number in range(20):
            spec = generate(families[number % len(families)], 1, chance)
            turns = [RecordedTurn(command=t.command, output=t.output, exit_code=0) for t in spec.turns]
            record = {"task_id": f"task-{number}", "messages": messages(spec.instruction, turns)}
            file.write(json.dumps(record) + "\n")
    return path
