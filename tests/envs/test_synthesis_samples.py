"""The sample tasks in the repository are real: strict, gated, and what the families make today."""

from pathlib import Path

import pytest

from burnish.envs.config import SandboxConfig, SandboxKind
from burnish.envs.sandbox.base import open_sandboxes
from burnish.envs.synthesis.gates import Gates
from burnish.envs.synthesis.samples import DIRECTORY, write_samples
from burnish.envs.synthesis.spec import OracleTurn
from burnish.envs.task import Task
from burnish.envs.taskset import load_taskset
from burnish.verifiers.hidden_tests import HiddenTests


def content(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_samples_are_what_the_families_make_today(tmp_path):
    write_samples(tmp_path)
    assert content(DIRECTORY) == content(tmp_path), "run python -m burnish.envs.synthesis.samples"


def samples() -> list[Task]:
    return list(load_taskset(DIRECTORY).tasks)


def test_their_names_are_kebab_case():
    domains = [task.config.metadata["domain"] for task in samples()]
    assert (domains.count("terminal"), domains.count("coding")) == (8, 6)
    assert all(task.id == task.id.lower() and "_" not in task.id for task in samples())


@pytest.mark.parametrize("task", samples(), ids=lambda task: task.id)
def test_a_sample_passes_its_gates(task):
    sandboxes = open_sandboxes(SandboxConfig(), SandboxKind.local)
    outputs = {}
    sandbox = sandboxes.create(task, role="agent", run_id="test", attempt_id="first")
    for command in task.solution_lines():
        outputs[command] = sandbox.run(command, 10.0).output
    sandbox.close()
    oracle = tuple(OracleTurn(command=command, output=output) for command, output in outputs.items())
    report = Gates(sandboxes, HiddenTests(sandboxes), "test").check(task, oracle)
    sandboxes.close()
    assert report.accepted, report.reason
