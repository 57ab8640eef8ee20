"""The report of a pipeline: what each stage achieved, with intervals, and what it cost. Reads files, trains nothing.

`summary.json` is for machines, `table.md` and `curves.png` for people; the table is printed too.
"""

import itertools
import json
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from burnish.policy.checkpoint.whole_files import write_json, write_text
from burnish.policy.training.metrics import read_metrics
from burnish.rollout.stats import compare, read_results

# what a student is compared with
SPECIALIST = {"rl": "specialist"}


@dataclass(frozen=True, kw_only=True)
class ReportInputs:
    """Where a pipeline's results lie."""

    evals: dict[str, dict[str, Path]]
    """Stage -> domain -> folder of its evaluation, in the pipeline's order."""
    sft: Path | None
    """Run folder."""
    acting: Sequence[Path]
    """Run folders of RL and distillation."""
    containers: int
    seconds: float
    seed: int = 0


def summarise(inputs: ReportInputs) -> dict[str, Any]:
    """The content of summary.json.

    Raises:
        ResultsError: results of a stage are missing or cannot be compared.
    """
    stages: dict[str, dict[str, Any]] = {}
    episodes = 0
    for stage, folders in inputs.evals.items():
        stages[stage] = {}
        for domain, folder in folders.items():
            result = json.loads((folder / "summary.json").read_text())["domains"][domain]
            stages[stage][domain] = {key: result[key] for key in ("pass", "n", "lo", "hi")}
            episodes += sum(row["attempts"] for row in read_results(folder / "results.jsonl"))
    gains: dict[str, dict[str, Any]] = {}
    for before, after in itertools.pairwise(inputs.evals):
        gains[f"{after}-{SPECIALIST.get(before, before)}"] = {
            domain: gain_of(inputs.evals[before][domain], folder, domain, inputs.seed)
            for domain, folder in inputs.evals[after].items()
        }
    tokens = sft_tokens(inputs.sft) if inputs.sft else 0
    for folder in inputs.acting:
        acted = acting_totals(folder)
        episodes, tokens = episodes + acted["episodes"], tokens + acted["tokens"]
    return {
        "stages": stages,
        "gains": gains,
        "containers": inputs.containers,
        "episodes": episodes,
        "tokens_trained": tokens,
        "seconds": round(inputs.seconds, 1),
    }


def gain_of(before: Path, after: Path, domain: str, seed: int) -> dict[str, float]:
    """Gain of one evaluation over another one of the same tasks."""
    gain = compare(before / "results.jsonl", after / "results.jsonl", seed=seed)[domain]
    return {"mean": gain.mean, "lo": gain.lo, "hi": gain.hi}


def sft_tokens(run: Path) -> int:
    """Tokens that carried SFT loss."""
    return int(sum(r["train/loss_tokens"] for r in read_metrics(run / "metrics.jsonl") if "train/loss_tokens" in r))


def acting_totals(run: Path) -> dict[str, int]:
    """Episodes that ended and sampled tokens that were trained, from the ledger."""
    ledger = sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)
    try:
        (episodes,) = ledger.execute(
            "SELECT count(*) FROM attempts WHERE outcome IS NOT NULL AND outcome != 'cancelled'"
        ).fetchone()
        (tokens,) = ledger.execute(
            "SELECT coalesce(sum(num_tokens), 0) FROM uses JOIN steps USING (step) WHERE state = 'committed'"
        ).fetchone()
    finally:
        ledger.close()
    return {"episodes": episodes, "tokens": tokens}


def write_report(inputs: ReportInputs, folder: Path) -> dict[str, Any]:
    """Write and print the report; returns the content of summary.json."""
    summary = summarise(inputs)
    folder.mkdir(parents=True, exist_ok=True)
    draw_curves(inputs, summary, folder / "curves.png")
    write_text(folder / "table.md", markdown(summary))
    write_json(folder / "summary.json", summary)
    show(summary)
    return summary


def rows_of(summary: dict[str, Any]) -> list[list[str]]:
    """One row a stage and domain: pass rate, its interval, n, gain over the stage before, its interval."""
    rows = []
    gains_of = {name.split("-")[0]: gains for name, gains in summary["gains"].items()}
    for stage, domains in summary["stages"].items():
        for domain, result in domains.items():
            gain = gains_of.get(stage, {}).get(domain)
            rows.append(
                [
                    stage,
                    domain,
                    f"{result['pass']:.3f}",
                    f"[{result['lo']:.3f}, {result['hi']:.3f}]",
                    str(result["n"]),
                    f"{gain['mean']:+.3f} [{gain['lo']:+.3f}, {gain['hi']:+.3f}]" if gain else "",
                ]
            )
    return rows


HEADINGS = ["stage", "domain", "pass", "95% interval", "tasks", "gain over the stage before"]


def totals_of(summary: dict[str, Any]) -> str:
    return (
        f"{summary['containers']} containers, {summary['episodes']} episodes, {summary['tokens_trained']} tokens trained, "
        f"{summary['seconds'] / 60:.1f} minutes"
    )


def markdown(summary: dict[str, Any]) -> str:
    """table.md."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *rows_of(summary)]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"{table}\n\n{totals_of(summary)}. Intervals: Wilson for a rate, paired bootstrap over tasks for a gain.\n"


def show(summary: dict[str, Any]) -> None:
    """Print the table."""
    # piped, a console takes 80 columns and cuts the intervals
    console, table = Console(width=None if sys.stdout.isatty() else 120), Table()
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=True)
    for row in rows_of(summary):
        table.add_row(*row)
    console.print(table)
    console.print(totals_of(summary))


def draw_curves(inputs: ReportInputs, summary: dict[str, Any], path: Path) -> None:
    """Four panels: SFT loss, reward by run, distance to the teachers, pass rate by stage."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, ((loss, reward), (distance, passes)) = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    sft = read_metrics(inputs.sft / "metrics.jsonl") if inputs.sft else []
    acting = {folder.name: read_metrics(folder / "metrics.jsonl") for folder in inputs.acting}
    shown = {"training": (sft, "train/loss"), "validation": (sft, "train/validation_loss")}
    _plot(loss, shown, "SFT loss (nats a token)")
    _plot(reward, {name: (run, "rollout/reward") for name, run in acting.items()}, "Mean reward by policy version")
    _plot(
        distance,
        {name: (run, "distill/kl") for name, run in acting.items()},
        "Distillation: KL to the teachers (nats a token)",
    )
    for domain in sorted({d for domains in summary["stages"].values() for d in domains}):
        results = [domains[domain] for domains in summary["stages"].values() if domain in domains]
        names = [stage for stage, domains in summary["stages"].items() if domain in domains]
        below = [r["pass"] - r["lo"] for r in results]
        above = [r["hi"] - r["pass"] for r in results]
        passes.errorbar(names, [r["pass"] for r in results], [below, above], marker="o", capsize=4, label=domain)
    passes.set(title="Pass rate on held-out tasks, 95% interval", ylim=(0, 1))
    passes.legend()
    staged = path.with_name(f".writing-{path.name}")
    figure.savefig(staged, dpi=120)
    plt.close(figure)
    staged.replace(path)


def _plot(axes: Any, lines: Mapping[str, tuple[list[dict[str, Any]], str]], title: str) -> None:
    """One line for each label: the metric of that name over the records' steps."""
    for label, (records, name) in lines.items():
        points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
        if points:
            # a line of one point is nothing
            axes.plot(*zip(*points, strict=True), label=label, marker="." if len(points) < 30 else None)
    axes.set(title=title, xlabel="optimizer step")
    if axes.has_data():
        axes.legend()
