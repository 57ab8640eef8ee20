"""Decode attention at the released model's shape, for aot.py."""

from burnish.kernels.attention.decode import _combine_kernel, _decode_kernel
from burnish.kernels.attention.decode_hopper import decode_kernel as hopper_kernel
from burnish.kernels.attention.decode_staged import decode_kernel as staged_kernel

_DECODE = {
    "q_ptr": "*i32", "ring_ptr": "*u8", "window_ptr": "*i32", "table_ptr": "*u8", "selected_ptr": "*i32",
    "sink_ptr": "*fp32", "out_ptr": "*i32", "part_ptr": "*i32", "lse_ptr": "*fp32",
    "num_window": "i32", "num_selected": "i32", "scale": "fp32",
}  # fmt: skip
_HOPPER = {"ring_words_ptr": "*i32", "table_words_ptr": "*i32"}
_HOPPER |= {name: kind for name, kind in _DECODE.items() if name != "part_ptr"}
_STAGED = {name: kind for name, kind in _HOPPER.items() if name != "table_ptr"}
_COMBINE = {"part_ptr": "*i32", "lse_ptr": "*fp32", "sink_ptr": "*fp32", "out_ptr": "*i32"}


def _decode(splits: int, asm: bool) -> dict:
    return {
        "H": 64, "HEADS": 64, "PAIRS": 256, "WORDS": 256, "SPLITS": splits, "BLOCK": 64, "BF16": True, "WIDE": False,
        "ASM": asm, "NATIVE": True,
    }  # fmt: skip


ENTRIES = [
    *(
        (f"decode {splits} splits{' asm' * asm}", _decode_kernel, _DECODE, _decode(splits, asm), {"num_warps": 8, "num_stages": 2})
        for splits in (1, 4)
        for asm in (False, True)
    ),
    *(
        (f"decode {name} {splits}", kernel, signature, {"SPLITS": splits}, {"num_warps": 4})
        for name, kernel, signature in (("hopper", hopper_kernel, _HOPPER), ("staged", staged_kernel, _STAGED))
        for splits in (1, 4)
    ),
    (
        "decode combine", _combine_kernel, _COMBINE,
        {"H": 64, "PAIRS": 256, "WORDS": 256, "SPLITS": 4, "HEADS": 8, "BF16": True, "NATIVE": True}, {"num_warps": 4},
    ),
]  # fmt: skip
