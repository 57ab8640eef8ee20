"""Indexer scores and exact top-k at the released model's shape, for aot.py."""

from burnish.kernels.attention.index_scores import _fold_query_kernel, _index_scores_kernel
from burnish.kernels.attention.select_top import _descend_kernel, _maxima_kernel, _select_kernel

_SCORES = {
    "q_ptr": "*u8", "w_ptr": "*fp32", "rows_ptr": "*u8", "table_ptr": "*i32", "context_ptr": "*i32",
    "visible_ptr": "*i32", "blocks_ptr": "*i32", "score_ptr": "*bf16", "max_ptr": "*bf16",
    "T": "i32", "P": "i32", "M": "i32", "TILES": "i32",
}  # fmt: skip
_FOLD = {"q_ptr": "*bf16", "w_ptr": "*bf16", "q8_ptr": "*u8", "w8_ptr": "*fp32", "num_heads": "i32"}
_INTS = dict.fromkeys(("stride", "M", "k", "num_fine", "num_coarse"), "i32")
_POINTERS = dict.fromkeys(("limit_ptr", "blocks_ptr", "out_ptr", "scratch_ptr"), "*i32")


def _scores(asm: bool, gather: bool = False) -> dict:
    return {
        "ENTRIES_PER_PAGE": 64, "ROW_BYTES": 68, "GROUPS": 4, "HEADS": 32, "ROWS": 1, "BLOCK_K": 64, "WARPS": 4,
        "GATHER": gather, "BLOCK_MAX": not gather, "PIN": not gather, "ROUND": False, "ASM": asm,
    }  # fmt: skip


def _select(label: str, kernel, constexprs: dict, dtype: str = "*fp32") -> tuple:
    types = dict.fromkeys(("score_ptr", "fine_ptr", "coarse_ptr"), dtype) | _INTS | _POINTERS
    names = {name: types[name] for name in kernel.arg_names if name not in constexprs}
    return label, kernel, names, constexprs, {"num_warps": 4 if kernel is _maxima_kernel else 8}


_TOP = {"VECTOR": 8, "SLOTS": 512}
ENTRIES = [
    ("fold query", _fold_query_kernel, _FOLD, {"C": 128, "HEADS": 32, "GROUPS": 4, "BLOCK_H": 8}, {"num_warps": 2}),
    ("index scores", _index_scores_kernel, _SCORES, _scores(True), {"num_warps": 4, "num_stages": 1}),
    ("index scores plain", _index_scores_kernel, _SCORES, _scores(False), {"num_warps": 4, "num_stages": 1}),
    ("reindex scores", _index_scores_kernel, _SCORES, _scores(True, gather=True), {"num_warps": 4, "num_stages": 1}),
    _select("top of 16K", _select_kernel, _TOP | {"BITS": 32, "HAS_BLOCKS": False, "GROUPED": True, "BLOCK": 16384}),
    _select("group maxima", _maxima_kernel, {"VECTOR": 8, "GROUP": 64, "COUNT": 64}),
    _select("top of 1M", _descend_kernel, _TOP | {"BITS": 32, "GROUP": 64, "COARSE": 2048}),
]  # fmt: skip
