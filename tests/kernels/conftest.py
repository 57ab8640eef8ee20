"""Tests of Triton kernels: where they can run, and outputs that start poisoned.

A test marked `triton` runs on a GPU, or in a process of Triton's interpreter (TRITON_INTERPRET=1 from the start);
test_interpreter.py starts one for all of them, so that the variable reaches no other test.
"""

import os

import pytest
import torch

from burnish.kernels.testing import poison


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return
    for item in items:
        if item.get_closest_marker("triton"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device; test_interpreter.py runs it in the interpreter"))


@pytest.fixture(autouse=True)
def kernels_run_and_empty_is_poisoned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marked tests run kernels, never twins in their place, and torch.empty hands out what no kernel writes."""
    if not request.node.get_closest_marker("triton"):
        return
    monkeypatch.setenv("BURNISH_KERNELS", "triton")
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def poisoned(*args, _make=make, **kwargs):
            out = _make(*args, **kwargs)
            poison(out)
            return out

        monkeypatch.setattr(torch, name, poisoned)
