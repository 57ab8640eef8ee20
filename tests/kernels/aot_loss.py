"""Linear log-probability at the released model's shape, for aot.py."""

from burnish.kernels.loss.linear_logprob import _logit_grad_kernel, _logprob_fwd_kernel

_INTS = ("T", "D", "V", "SPAN", "first", "width")
_FLOATS = ("part_ptr", "lse_ptr", "entropy_ptr", "dlogprob_ptr", "dentropy_ptr")
_CONSTEXPRS = {
    "HAS_BANNED": False,
    "PRECISION": "tf32",
    "BLOCK_T": 128,
    "BLOCK_V": 256,
    "BLOCK_D": 64,
    "banned_ptr": None,
}


def _entry(label: str, kernel) -> tuple:
    types = {"target_ptr": "*i64", "inverse_temperature": "fp32"}
    for name in kernel.arg_names:
        if name in _INTS:
            types[name] = "i32"
        elif name in _FLOATS:
            types[name] = "*fp32"
        elif name in ("h_ptr", "w_ptr", "dz_ptr"):
            types[name] = "*bf16"
    types = {name: types[name] for name in kernel.arg_names if name not in _CONSTEXPRS}
    return label, kernel, types, _CONSTEXPRS, {"num_warps": 8, "num_stages": 3}


ENTRIES = [_entry("log-probability", _logprob_fwd_kernel), _entry("gradient of logits", _logit_grad_kernel)]
