"""What evaluations of a run say: pass rates with intervals, also of one that is still going, and paired gains."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from burnish.rollout.page.folder import Part, order_of
from burnish.rollout.page.markup import Html, section, table, tag
from burnish.rollout.stats import Interval, paired_bootstrap, pass_rates, rate_interval, read_results

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation as far as it has come."""

    stage: str
    part: Part
    rows: Sequence[dict[str, Any]]
    """Graded and ungraded episodes."""

    @property
    def is_finished(self) -> bool:
        return bool(self.part.summary)

    @property
    def domains(self) -> list[str]:
        return sorted({str(row.get("domain", "all")) for row in self.rows})

    def rates(self, domain: str) -> dict[str, float]:
        """Pass rate by task id."""
        return pass_rates([row for row in self.rows if str(row.get("domain", "all")) == domain])

    def interval(self, domain: str) -> Interval:
        """Wilson where each task was played once, else a bootstrap over tasks; as `burnish eval` has it."""
        samples = int(self.part.conditions.get("samples", 1))
        seed = int(self.part.conditions.get("seed", 0))
        return rate_interval(self.rates(domain), samples=samples, seed=seed, confidence=CONFIDENCE)


def evaluations_of(parts: Sequence[Part]) -> list[Evaluation]:
    """Evaluations in the order their pipeline ran them, or else in the order they ended.

    Raises:
        ResultsError: a results.jsonl is damaged; names file and line.
    """
    order = order_of(parts[0])
    found = []
    for part in parts:
        if part.is_evaluation:
            stage = str(part.summary.get("stage") or part.path.resolve().name)
            rows = read_results(part.path / "results.jsonl")
            ended = float(part.summary.get("written") or (part.path / "results.jsonl").stat().st_mtime)
            place = order.get(f"eval-{part.path.name}", len(order))
            found.append((place, ended, Evaluation(stage=stage, part=part, rows=rows)))
    return [evaluation for *_, evaluation in sorted(found, key=lambda entry: entry[:2])]


def gains_of(evaluations: Sequence[Evaluation], seed: int = 0) -> list[tuple[str, str, Interval]]:
    """(`after-before`, domain, gain) of each evaluation over the one before it that graded the same domain."""
    gains = []
    for domain in sorted({domain for evaluation in evaluations for domain in evaluation.domains}):
        covering = [evaluation for evaluation in evaluations if evaluation.rates(domain)]
        for before, after in pairwise(covering):
            first, second = before.rates(domain), after.rates(domain)
            shared = first.keys() & second.keys()
            if shared:
                gain = paired_bootstrap({t: first[t] for t in shared}, {t: second[t] for t in shared}, seed)
                gains.append((f"{after.stage}-{before.stage}", domain, gain))
    return gains


def results_section(parts: Sequence[Part]) -> Html:
    """Table of stages and table of gains."""
    evaluations = evaluations_of(parts)
    rows = []
    for evaluation in evaluations:
        for domain in evaluation.domains:
            rate = evaluation.interval(domain)
            ungraded = sum(r["passed"] is None for r in evaluation.rows if str(r.get("domain", "all")) == domain)
            state = "" if evaluation.is_finished else "not finished: episodes so far"
            interval = f"[{rate.lo:.3f}, {rate.hi:.3f}]"
            rows.append([evaluation.stage, domain, f"{rate.mean:.3f}", interval, rate.n, ungraded, state])
    gains = [
        [name, domain, f"{gain.mean:+.3f}", f"[{gain.lo:+.3f}, {gain.hi:+.3f}]", gain.n, "yes" if gain.lo > 0 else "no"]
        for name, domain, gain in gains_of(evaluations)
    ]
    known = {(name, domain) for name, domain, *_ in gains}
    gains += [row for row in reported_gains(parts[0]) if (row[0], row[1]) not in known]
    return section(
        "Results",
        tag(
            "p",
            "Pass rates on held-out tasks: Wilson intervals, bootstrap over tasks where a task has several episodes.",
        ),
        table(["stage", "domain", "pass", "95% interval", "tasks", "ungraded", ""], rows),
        tag("p", "Gains over the evaluation before, paired by task; one counts where its interval lies above 0."),
        table(["gain", "domain", "mean", "95% interval", "tasks", "counts"], gains),
    )


def reported_gains(run: Part) -> list[list[Any]]:
    """Gains that the pipeline itself has named, such as a distilled policy over its specialists."""
    found = []
    for name, domains in (run.totals.get("gains") or {}).items():
        for domain, gain in domains.items():
            interval = f"[{gain['lo']:+.3f}, {gain['hi']:+.3f}]"
            counts = "yes" if gain["lo"] > 0 else "no"
            found.append([name, domain, f"{gain['mean']:+.3f}", interval, gain.get("n", ""), counts])
    return found
