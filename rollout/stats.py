"""Intervals of an evaluation: Wilson for a pass rate, a paired bootstrap over tasks for the gain between two results.

Knows numbers and results files, nothing of tasks or models. Sources: Wilson 1927 (score interval); Efron and Tibshirani
1993, chapter 13 (percentile bootstrap).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000
# resamples drawn at once: bounds the index array to 1,000 x tasks whatever the task count
CHUNK = 1_000


class ResultsError(ValueError):
    """A results file that cannot be read or compared: names the file and the line or tasks."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its confidence bounds."""

    mean: float
    lo: float
    hi: float
    n: int
    """Independent units behind the mean: episodes for a rate, tasks for a gain."""


def wilson(passed: int, n: int, confidence: float = 0.95) -> Interval:
    """Score interval of a binomial rate; stays inside [0, 1] and is honest at 0 and n passes.

    Raises:
        ValueError: n < 1, passed outside [0, n], or confidence outside (0, 1).
    """
    if n < 1 or not 0 <= passed <= n:
        raise ValueError(f"a rate needs n >= 1 and 0 <= passed <= n, got passed={passed} n={n}")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must lie inside (0, 1), got {confidence}")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = passed / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # the bounds are exactly 0 and 1 at the ends; rounding would leave 1e-17
    lo = 0.0 if passed == 0 else max(0.0, centre - half)
    hi = 1.0 if passed == n else min(1.0, centre + half)
    return Interval(mean=rate, lo=lo, hi=hi, n=n)


def bootstrap_mean(values_T: np.ndarray, seed: int, confidence: float = 0.95, resamples: int = RESAMPLES) -> Interval:
    """Percentile bootstrap of the mean over tasks.

    Args:
        values_T: [tasks] float, one value a task (its samples already averaged).
        seed: of the resampling; the same seed gives the same bounds.
    """
    if values_T.ndim != 1 or len(values_T) == 0:
        raise ValueError(f"a bootstrap needs a list of at least one task, got shape {values_T.shape}")
    draw = np.random.default_rng(seed)
    means = []
    for start in range(0, resamples, CHUNK):
        count = min(CHUNK, resamples - start)
        means.append(values_T[draw.integers(0, len(values_T), size=(count, len(values_T)))].mean(axis=1))
    tail = (1 - confidence) / 2
    lo, hi = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return Interval(mean=float(values_T.mean()), lo=float(lo), hi=float(hi), n=len(values_T))


def rate_interval(rates: Mapping[str, float], *, samples: int, seed: int, confidence: float = 0.95) -> Interval:
    """Interval of a pass rate: Wilson where each task was played once; else tasks are the independent units, not episodes.

    Args:
        rates: pass rate by task id.
        samples: episodes of each task.
    """
    if not rates:
        return Interval(mean=0.0, lo=0.0, hi=1.0, n=0)
    if samples == 1:
        return wilson(round(sum(rates.values())), len(rates), confidence)
    return bootstrap_mean(np.array([rates[task] for task in sorted(rates)]), seed, confidence)


def paired_bootstrap(
    before: Mapping[str, float], after: Mapping[str, float], seed: int = 0, confidence: float = 0.95
) -> Interval:
    """Gain `after - before` with its interval, resampling tasks so that a task's difficulty cancels.

    Args:
        before: mean reward or pass rate by task id; `after` likewise, over the same tasks.

    Raises:
        ResultsError: the two hold different tasks.
    """
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        raise ResultsError(
            f"a paired comparison needs the same tasks on both sides; {len(odd)} differ, first {odd[0]!r}"
        )
    tasks = sorted(before)
    return bootstrap_mean(np.array([after[t] - before[t] for t in tasks], dtype=np.float64), seed, confidence)


def read_results(path: Path) -> list[dict]:
    """The lines of a results.jsonl.

    A last line without its newline is what a killed writer leaves: it is ignored, and that episode runs again.

    Raises:
        ResultsError: missing file, or a complete line that is not a JSON object with `task` and `passed`.
    """
    if not path.is_file():
        raise ResultsError(f"no results at {path}; run `burnish eval` first")
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ResultsError(f"{path} line {number}: not JSON ({error})") from error
        if not isinstance(row, dict) or not {"task", "passed"} <= row.keys():
            raise ResultsError(f"{path} line {number}: expected an object with 'task' and 'passed'")
        rows.append(row)
    return rows


def pass_rates(rows: list[dict]) -> dict[str, float]:
    """Pass rate by task id over the samples that carry a grade; a task with none is left out."""
    by_task: dict[str, list[float]] = {}
    for row in rows:
        if row["passed"] is not None:
            by_task.setdefault(row["task"], []).append(float(row["passed"]))
    return {task: sum(values) / len(values) for task, values in by_task.items()}


def compare(before: Path, after: Path, seed: int = 0) -> dict[str, Interval]:
    """Gain by domain between two results files, over the tasks that both graded; 'all' spans the domains."""
    rows_before, rows_after = read_results(before), read_results(after)
    rates_before, rates_after = pass_rates(rows_before), pass_rates(rows_after)
    domain_of = {row["task"]: row.get("domain", "all") for row in rows_before + rows_after}
    shared = sorted(rates_before.keys() & rates_after.keys())
    if not shared:
        raise ResultsError(f"{before} and {after} share no graded task")
    gains = {}
    for domain in [*sorted({domain_of[task] for task in shared}), "all"]:
        tasks = [task for task in shared if domain in (domain_of[task], "all")]
        gains[domain] = paired_bootstrap({t: rates_before[t] for t in tasks}, {t: rates_after[t] for t in tasks}, seed)
    return gains
