"""A TaskSpec as a task folder in the Harbor format: schema 1.4, separate verifier, declared artifacts, no network.

The artifact is the working directory: one call to the engine, where a list of files costs one each. The verifier's
environment is the bare base image, not a copy of the agent's, so what the agent deleted stays deleted.
"""

import json
import shutil
from pathlib import Path

from burnish.envs.synthesis.generate import GENERATOR_VERSION
from burnish.envs.synthesis.spec import TaskSpec

BASE_IMAGE = "burnish-base:1"
WORKDIR = "/app"
TEMPLATE = Path(__file__).parent / "template"
AGENT_TIMEOUT_S = 120
VERIFIER_TIMEOUT_S = 60
CPUS = 1
MEMORY_MB = 256

# every value put in here is made of letters, digits, hyphens, dots and slashes: nothing to escape
_TASK_TOML = """\
schema_version = "1.4"
artifacts = ["{workdir}"]

[task]
name = "burnish/{task_id}"
description = "Task of the domain {domain}, family {family}."
keywords = ["{domain}", "{family}"]

[metadata]
domain = "{domain}"
family = "{family}"
difficulty = {difficulty}
generator_version = {generator_version}

[agent]
timeout_sec = {agent_timeout_s}.0

[verifier]
timeout_sec = {verifier_timeout_s}.0
environment_mode = "separate"

[verifier.environment]
docker_image = "{image}"
workdir = "{workdir}"
cpus = {cpus}
memory_mb = {memory_mb}
network_mode = "no-network"

[environment]
workdir = "{workdir}"
cpus = {cpus}
memory_mb = {memory_mb}
network_mode = "no-network"
"""


def task_id(spec: TaskSpec, index: int) -> str:
    """Kebab-case, as `sort-lines-amber-wheel-0017`."""
    return f"{spec.family}-{spec.name}-{index:04d}"


def _task_toml(spec: TaskSpec, name: str) -> str:
    return _TASK_TOML.format(
        task_id=name,
        domain=spec.domain,
        family=spec.family,
        difficulty=spec.difficulty,
        generator_version=GENERATOR_VERSION,
        agent_timeout_s=AGENT_TIMEOUT_S,
        verifier_timeout_s=VERIFIER_TIMEOUT_S,
        image=BASE_IMAGE,
        workdir=WORKDIR,
        cpus=CPUS,
        memory_mb=MEMORY_MB,
    )


def task_files(spec: TaskSpec, name: str) -> dict[str, bytes]:
    """Every file of the task folder, by relative path: the same bytes for the same spec, always."""
    expected = {
        "files": {path: content.decode() for path, content in spec.fixed_files.items()},
        "absent": list(spec.absent),
    }
    # no COPY of an empty folder: git does not keep one
    copy = "COPY files/ /app/\n" if spec.files else ""
    return {
        "task.toml": _task_toml(spec, name).encode(),
        "instruction.md": f"{spec.instruction}\n".encode(),
        "environment/Dockerfile": f"FROM {BASE_IMAGE}\nWORKDIR {WORKDIR}\n{copy}".encode(),
        **{f"environment/files/{path}": content for path, content in spec.files.items()},
        "solution/solve.sh": "".join(["#!/bin/bash\n", *(f"{turn.command}\n" for turn in spec.turns)]).encode(),
        "tests/test.sh": (TEMPLATE / "test.sh").read_bytes(),
        "tests/check.py": (TEMPLATE / "check.py").read_bytes(),
        "tests/expected.json": (json.dumps(expected, indent=1, sort_keys=True) + "\n").encode(),
        **(_function_tests(spec) if spec.functions else {}),
    }


def _function_tests(spec: TaskSpec) -> dict[str, bytes]:
    """What check.py needs to call functions."""
    wanted = {
        "functions": [
            {
                "module": test.path.removesuffix(".py"),
                "name": test.name,
                "cases": [{"arguments": arguments, "returns": value} for arguments, value in test.cases],
            }
            for test in spec.functions
        ],
        "retired": [{"module": path.removesuffix(".py"), "name": name} for path, name in spec.retired],
    }
    return {
        "tests/candidate.py": (TEMPLATE / "candidate.py").read_bytes(),
        "tests/functions.json": (json.dumps(wanted, sort_keys=True) + "\n").encode(),
    }


def write_task(spec: TaskSpec, name: str, parent: Path) -> Path:
    """Write the folder `parent/name` in one step: an interrupted call leaves nothing under that name.

    An existing folder of that name is replaced.
    """
    target = parent / name
    building = parent / f".building-{name}"
    shutil.rmtree(building, ignore_errors=True)
    for relative, content in task_files(spec, name).items():
        path = building / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        if path.suffix == ".sh":
            path.chmod(0o755)
    shutil.rmtree(target, ignore_errors=True)
    building.replace(target)
    return target
