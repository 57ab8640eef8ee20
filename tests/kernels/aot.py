"""Ahead-of-time compilation of kernels for Hopper, without a GPU. Run as a program it compiles every table below.

A process of Triton's interpreter cannot compile, so test_aot.py starts this file as a process of its own.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

TABLES = ("aot_quant", "aot_ced", "aot_decode", "aot_mhc", "aot_index", "aot_loss")
"""Modules beside this file with ENTRIES: (label, kernel, signature, constexprs, options)."""
SHARED_MEMORY_BYTES = 227 * 1024
"""What one program of sm_90 may have."""


def compile_for_hopper(kernel: Any, signature: dict[str, str], constexprs: dict[str, Any], **options: Any) -> Any:
    """Compile for sm_90 and return what triton.compile does.

    Args:
        kernel: a @triton.jit or @gluon.jit function.
        signature: argument -> "*fp32", "i32", ...; pointers are taken to be aligned to 16 bytes.
        constexprs: the other arguments.
        options: num_warps, num_stages, enable_fp_fusion, ...
    """
    names = list(kernel.arg_names)
    types = {name: signature.get(name, "constexpr") for name in names}
    missing = [name for name in names if name not in signature and name not in constexprs]
    assert not missing, f"{kernel.__name__}: neither a type nor a value for {missing}"
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
    if hasattr(kernel, "is_gluon") and kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    source = Source(
        fn=kernel, signature=types, constexprs={(names.index(k),): v for k, v in constexprs.items()}, attrs=aligned
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"], f"{kernel.__name__}: no cubin"
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES, (
        f"{kernel.__name__}: {compiled.metadata.shared} bytes shared"
    )
    return compiled


def main() -> int:
    """Compile every entry whose label contains the first argument."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    sys.path.insert(0, str(Path(__file__).parent))
    for table in TABLES:
        for label, kernel, signature, constexprs, options in importlib.import_module(table).ENTRIES:
            if wanted in label:
                compiled = compile_for_hopper(kernel, signature, constexprs, **options)
                sys.stdout.write(f"{label}: {len(compiled.asm['cubin'])} bytes, {compiled.metadata.shared} shared\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
