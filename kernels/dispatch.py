"""One switch between a kernel and its reference twin."""

import os

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
