"""Row kernels at the released model's widths, for aot.py."""

from burnish.kernels.quant.read import _read_rows_kernel
from burnish.kernels.quant.write import _write_rows_kernel

_WRITE = {
    "x_ptr": "*i32", "weight_ptr": "*i32", "rotation_ptr": "*i64", "slot_ptr": "*i64", "table_ptr": "*u8",
    "normed_ptr": "*i32", "num_rows": "i32", "eps": "fp32",
}  # fmt: skip
_READ = {"table_ptr": "*u8", "slot_ptr": "*i32", "out_ptr": "*i32", "num_rows": "i32"}


def _write(form: int, pairs: int, group: int, norm: bool) -> dict:
    return {
        "PAIRS": pairs, "WORDS": pairs, "CHUNK": 64, "TURNED": 32 if norm else 0, "GROUP": group, "FORM": form,
        "NORM": norm, "KEEPS": norm, "SCATTER": norm, "BF16": True, "WEIGHT_BF16": norm, "STORED": norm, "NATIVE": True, "ROWS": 16,
    }  # fmt: skip


def _read(form: int, pairs: int, group: int) -> dict:
    return {
        "PAIRS": pairs, "WORDS": pairs, "GROUP": group, "FORM": form, "GATHER": True, "BF16": True, "ROWS": 2048 // pairs,
    }  # fmt: skip


_FORMS = {"fp8": (0, 256, 32), "mxfp4": (1, 64, 32), "nvfp4": (2, 256, 16)}
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
ENTRIES = [
    *(
        (f"write {name}{' norm' * norm}", _write_rows_kernel, _WRITE, _write(*form, norm), _OPTIONS)
        for name, form in _FORMS.items()
        for norm in (False, True)
    ),
    *((f"read {name}", _read_rows_kernel, _READ, _read(*form), {"num_warps": 4}) for name, form in _FORMS.items()),
]
