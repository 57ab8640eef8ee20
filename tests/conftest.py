"""What every test may rely on: one seed, markers that skip where the machine lacks the part, no network trackers."""

import os
import random
import shutil
import subprocess
import sys
from functools import cache

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
