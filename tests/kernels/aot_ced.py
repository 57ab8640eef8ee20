"""Entries of a Full layer at the released model's widths, for aot.py."""

from burnish.kernels.ced.entries import _write_entries_kernel

_SIGNATURE = {
    "x_ptr": "*i32", "norm_ptr": "*i32", "key_ptr": "*bf16", "key_norm_ptr": "*i32", "rotation_ptr": "*i64",
    "slot_ptr": "*i64", "main_ptr": "*u8", "index_ptr": "*u8", "num_rows": "i32", "eps": "fp32",
}  # fmt: skip
_CONSTANTS = {
    "PAIRS": 256, "WORDS": 256, "CHUNK": 64, "KEY": 128, "TURNED": 32, "BF16": True, "STORED": False, "NATIVE": True,
    "ROWS": 64,
}  # fmt: skip
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False, "maxnreg": 128}
ENTRIES = [("ced entries", _write_entries_kernel, _SIGNATURE, _CONSTANTS, _OPTIONS)]
