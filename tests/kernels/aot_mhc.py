"""Hyper-connections, norm and rotation at the released model's shape, for aot.py."""

from burnish.kernels.mhc.boundary import _boundary_fwd_kernel, _coefficients_kernel
from burnish.kernels.mhc.boundary_backward import (
    _boundary_bwd_kernel,
    _coefficients_bwd_kernel,
    _projection_grad_kernel,
)
from burnish.kernels.norm.rms_norm import _rms_norm_bwd_kernel, _rms_norm_fwd_kernel
from burnish.kernels.rope.rotate import _rotate_kernel

_BF16 = (
    "x_ptr",
    "y_ptr",
    "w_ptr",
    "out_ptr",
    "z_ptr",
    "high_ptr",
    "low_ptr",
    "dout_ptr",
    "dz_ptr",
    "dx_ptr",
    "dy_ptr",
    "n_ptr",
)
_INTS = ("R", "D", "D4", "SPAN", "N", "L", "H", "C", "num_splits", "num_values", "ITERS")


def _types(kernel, constexprs: dict) -> dict[str, str]:
    """bf16 streams, fp32 coefficients."""
    names = [name for name in kernel.arg_names if name not in constexprs]
    return {
        name: "*bf16" if name in _BF16 else "*fp32" if name.endswith("_ptr") else "i32" if name in _INTS else "fp32"
        for name in names
    }


def _entry(label: str, kernel, constexprs: dict, **options) -> tuple:
    return label, kernel, _types(kernel, constexprs), constexprs, options


_WHOLE = {"HAS_EXPAND": True, "HAS_COEF": True, "PRECISION": "tf32"}
ENTRIES = [
    _entry("mhc many rows", _boundary_fwd_kernel, _WHOLE | {"BLOCK_R": 64, "BLOCK_D": 64}, num_warps=8, num_stages=3),
    _entry("mhc few rows", _boundary_fwd_kernel, _WHOLE | {"BLOCK_R": 16, "BLOCK_D": 64}, num_warps=4, num_stages=2),
    _entry(
        "mhc last", _boundary_fwd_kernel, _WHOLE | {"HAS_COEF": False, "BLOCK_R": 64, "BLOCK_D": 64},
        num_warps=8, num_stages=3,
    ),
    _entry("mhc coefficients", _coefficients_kernel, {"SPLITS": 2, "BLOCK_R": 128, "LANES": 128}, num_warps=4),
    _entry("mhc coefficients of few rows", _coefficients_kernel, {"SPLITS": 16, "BLOCK_R": 8, "LANES": 128}, num_warps=4),
    _entry("mhc coefficients backward", _coefficients_bwd_kernel, {"BLOCK_R": 32}, num_warps=1),
    _entry(
        "mhc backward", _boundary_bwd_kernel, _WHOLE | {"HAS_LOW": True, "BLOCK_R": 16, "BLOCK_D": 64},
        num_warps=4, num_stages=2,
    ),
    _entry(
        "mhc projection backward", _projection_grad_kernel,
        {"HAS_LOW": True, "PRECISION": "tf32", "BLOCK_R": 64, "BLOCK_D": 128}, num_warps=4, num_stages=4,
    ),
    _entry("rms norm", _rms_norm_fwd_kernel, {"BLOCK_N": 1, "BLOCK_D": 8192}, num_warps=8),
    _entry("rms norm backward", _rms_norm_bwd_kernel, {"BLOCK_N": 1, "BLOCK_D": 8192}, num_warps=8),
    _entry(
        "rotate", _rotate_kernel,
        {"PAIRS": 32, "INVERSE": False, "COPY_HEAD": True, "BLOCK_L": 16, "BLOCK_C": 512}, num_warps=4,
    ),
]  # fmt: skip
