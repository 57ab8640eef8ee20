"""One switch between a kernel and its reference twin, and what a launch asks of the device."""

import os
from functools import cache

import torch


def use_reference(x: torch.Tensor) -> bool:
    """True when the plain twin is to run on `x`.

    BURNISH_KERNELS=reference asks for the twin everywhere; BURNISH_KERNELS=triton for the kernel also on CPU tensors,
    which only Triton's interpreter can run (TRITON_INTERPRET=1 before triton is imported). Without it GPU tensors go to
    the kernel and others to the twin.
    """
    choice = os.environ.get("BURNISH_KERNELS", "")
    if choice not in ("", "reference", "triton"):
        raise ValueError(f"BURNISH_KERNELS must be reference or triton (or unset), got {choice!r}")
    if choice == "reference":
        return True
    return not x.is_cuda and choice != "triton"


def is_interpreted() -> bool:
    """Triton's interpreter runs the kernels: no inline assembly, and bf16 arithmetic is wrong there."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def num_multiprocessors(x: torch.Tensor) -> int:
    """Multiprocessors of the GPU that holds `x`; 2 in the interpreter, so that grids stay small there."""
    return _multiprocessors(x.device.index or 0) if x.is_cuda else 2
