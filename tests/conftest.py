"""What every test may rely on: one seed, markers that skip where the machine lacks the part, no network trackers."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@cache
def docker_answers() -> bool:
    """True when an engine answers within seconds."""
    if shutil.which("docker") is None:
        return False
    try:
        return subprocess.run(["docker", "version"], capture_output=True, timeout=20).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@cache
def cuda_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # on CI a missing engine is a failure of the set-up, never a silent skip
        if item.get_closest_marker("docker") and not os.environ.get("CI") and not docker_answers():
            item.add_marker(pytest.mark.skip(reason="no Docker engine answers: run make setup"))
        if item.get_closest_marker("gpu") and not cuda_is_there():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Same draws in every run; torch is seeded only where the test's module loaded it."""
    random.seed(42)
    np.random.seed(42)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(42)


TASK_TOML = """schema_version = "1.4"
artifacts = ["/app"]

[verifier]
environment_mode = "separate"
timeout_sec = 20
"""
# passes when /app/out.txt holds `hello`
TEST_SH = """#!/bin/bash
passed=0
[ "$(cat /app/out.txt)" = hello ] && passed=1
cat > /logs/verifier/ctrf.json <<END
{"results": {"tests": [{"name": "out", "status": "$([ $passed = 1 ] && echo passed || echo failed)"}]}}
END
echo $passed > /logs/verifier/reward.txt
"""


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Path]:
    """Writes a small Harbor task; keyword arguments replace single files by relative path (None leaves one out)."""

    def make(name: str = "say-hello", files: dict[str, str | None] | None = None) -> Path:
        content: dict[str, str | None] = {
            "task.toml": TASK_TOML,
            "instruction.md": "Write hello to out.txt\n",
            "environment/Dockerfile": "FROM burnish-base:1\nWORKDIR /app\nCOPY files/ /app/\n",
            "environment/files/note.txt": "a note\n",
            "tests/test.sh": TEST_SH,
            "solution/solve.sh": "#!/bin/bash\n# the oracle\necho hello > out.txt\n",
            **(files or {}),
        }
        folder = tmp_path / "tasks" / name
        for relative, text in content.items():
            if text is not None:
                path = folder / relative
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        return folder

    return make


@pytest.fixture(scope="session", params=["local", pytest.param("docker", marks=pytest.mark.docker)])
def sandboxes(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Both kinds of sandbox behind one protocol; a test that uses it runs on each. Leaves nothing behind."""
    from burnish.envs.config import SandboxConfig, SandboxKind
    from burnish.envs.sandbox.base import open_sandboxes

    factory = open_sandboxes(SandboxConfig(), SandboxKind(request.param))
    yield factory
    factory.close()
