"""Case: one line of the kernel table, and the device's limits that it is held against."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

BYTES_PER_S = 4.3e12
"""HBM of one H200, read and write, measured by a copy."""
FLOP_PER_S = 790e12
"""bf16 tensor cores of one H200, measured by a large product."""


@dataclass(kw_only=True)
class Case:
    """One kernel at one shape. `state` below is whatever `make` returned."""

    kernel: str
    shape: str
    make: Callable[[int], Any]
    """seed -> fresh inputs and preallocated outputs on the GPU."""
    run: Callable[[Any], Any]
    """Launches the kernel; capturable into a CUDA graph."""
    outputs: Callable[[Any], tuple[torch.Tensor, ...]]
    """Tensors that are poisoned before the checked run."""
    check: Callable[[Any], str]
    """Raises AssertionError when the outputs are wrong, else says how right they are."""
    size_bytes: float
    """Least bytes one launch must move."""
    flops: float = 0.0
    """Least multiply and add operations of one launch."""
    baseline: Callable[[Any], Any] | None = None
    """The same work in torch."""
    goal_us: float | None = None
    """The floor goal of the issue, where there is one."""
    sets: int | None = None
    """Input sets for the timing; None: as many as exceed three L2 caches."""

    @property
    def limit_us(self) -> float:
        """No version runs faster than this on the device."""
        return 1e6 * max(self.size_bytes / BYTES_PER_S, self.flops / FLOP_PER_S)
