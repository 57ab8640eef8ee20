"""One table of the kernels: each line checked on fresh inputs with poisoned outputs, then timed against its limit.

Writes benchmarks/results/<device>-kernels.json and a plot beside it.
"""

import argparse
import importlib
import json
import logging
import platform
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from cases import BYTES_PER_S, FLOP_PER_S, Case
from timing import l2_bytes, median_us

from burnish.kernels.testing import poison

MODULES = ("quant_cases", "decode_cases", "mhc_cases", "index_cases", "select_cases")
"""Modules of this folder with a `cases()`."""
_MOST_SETS = 600
HEADER = f"{'kernel':<24} {'shape':<34} {'us':>9} {'rate':>12} {'limit':>7} {'goal us':>8} {'torch us':>10} {'ratio':>7}  check"
logger = logging.getLogger(__name__)


def all_cases(only: str) -> Iterator[Case]:
    """Cases of every module whose "kernel shape" matches the pattern."""
    for name in MODULES:
        for case in importlib.import_module(name).cases():
            if re.search(only, f"{case.kernel} {case.shape}"):
                yield case


def measure(case: Case, seed: int) -> dict:
    """Check and time one case; a failed check gives a line without times."""
    line = {"kernel": case.kernel, "shape": case.shape, "limit_us": case.limit_us, "goal_us": case.goal_us}
    state = case.make(seed)
    poison(*case.outputs(state))
    case.run(state)
    torch.cuda.synchronize()
    try:
        line["check"] = case.check(state)
    except AssertionError as wrong:
        return line | {"check": f"FAILED: {wrong}"}
    sets = case.sets or int(min(_MOST_SETS, max(4, 3 * l2_bytes() // max(1, case.size_bytes) + 1)))
    states = [state, *(case.make(seed + index) for index in range(1, sets))]
    us = median_us(case.run, states)
    line |= {"us": us, "sets": sets, "of_limit": case.limit_us / us}
    line |= {"tb_s": case.size_bytes / us / 1e6, "tflop_s": case.flops / us / 1e6}
    if case.baseline is not None:
        line["baseline_us"] = median_us(case.baseline, states, replays=5)
        line["ratio"] = line["baseline_us"] / us
    return line


def row(line: dict) -> str:
    """One line of the printed table."""
    name = f"{line['kernel']:<24} {line['shape']:<34}"
    if "us" not in line:
        return f"{name} {line['check']}"
    rate = f"{line['tflop_s']:7.0f} TF/s" if line["tflop_s"] > 100 * line["tb_s"] else f"{line['tb_s']:7.2f} TB/s"
    text = f"{name} {line['us']:9.2f} {rate} {100 * line['of_limit']:6.1f}%"
    text += f" {line['goal_us']:8.1f}" if line["goal_us"] else " " * 9
    if "ratio" in line:
        text += f" {line['baseline_us']:10.1f} {line['ratio']:6.1f}x"
    else:
        text += " " * 19
    return f"{text}  {line['check']}"


def plot(lines: list[dict], path: Path) -> None:
    """Share of the limit that each line reaches, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [line for line in lines if "us" in line][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.22 * len(timed)))
    axes.barh([f"{line['kernel']} {line['shape']}" for line in timed], [100 * line["of_limit"] for line in timed])
    axes.set_xlabel(f"% of the limit ({BYTES_PER_S / 1e12:.1f} TB/s or {FLOP_PER_S / 1e12:.0f} TFLOP/s)")
    axes.tick_params(axis="y", labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")


def device_slug() -> str:
    """`NVIDIA H200` -> `h200`."""
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower().replace("nvidia", "")).strip("-")


def main() -> int:
    """Run the table; 1 when a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="regular expression over 'kernel shape'")
    parser.add_argument("--seed", type=int, default=None, help="of the inputs; default: the clock")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if not torch.cuda.is_available():
        logger.error("benchmarks/kernels.py measures a CUDA device, and torch finds none here")
        return 2
    import triton

    seed = int(time.time()) % 100_000 if arguments.seed is None else arguments.seed
    lines = []
    logger.info("%s, torch %s, triton %s", torch.cuda.get_device_name(0), torch.__version__, triton.__version__)
    logger.info(HEADER)
    for case in all_cases(arguments.only):
        lines.append(measure(case, seed))
        logger.info("%s", row(lines[-1]))
        torch.cuda.empty_cache()
    out = arguments.out or Path(__file__).parent / "results"
    out.mkdir(parents=True, exist_ok=True)
    name = f"{device_slug()}-kernels"
    report = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "seed": seed,
        "limits": {"bytes_per_s": BYTES_PER_S, "flop_per_s": FLOP_PER_S},
        "lines": lines,
    }
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(lines, out / f"{name}.png")
    return int(any("us" not in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
