"""Every kernel compiles for Hopper without a GPU, and takes no more shared memory than one program may have."""

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_compile_ahead_of_time():
    # the interpreter's process compiles nothing: another one, without its variable
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("aot.py"))]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    assert "write nvfp4 norm" in done.stdout
