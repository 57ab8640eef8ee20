"""Curves of a training run from its metrics, and what its ledger says of slots, attempts and ages."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from burnish.policy.training.metrics import read_metrics
from burnish.rollout.ledger_view import LedgerView
from burnish.rollout.page.charts import Points, chart
from burnish.rollout.page.markup import Html, folded, joined, section, table, tag

# title -> names; the first that fits takes a metric, and what fits none is in the table of the others
GROUPS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("reward", re.compile(r"/reward(_\w+)?$")),
    ("pass rate", re.compile(r"/pass(_\w+)?$")),
    ("KL of engine and trainer, and other KL", re.compile(r"kl(_|$)")),
    ("entropy (nats)", re.compile(r"entropy(_|$)")),
    ("loss", re.compile(r"(^|[/_])loss$")),
    ("gradient norm", re.compile(r"grad_norm")),
    ("age and staleness", re.compile(r"(^|[/_])ages?(_|$)|stale")),
    ("tokens a second", re.compile(r"tokens_per_s$")),
    ("seconds", re.compile(r"(/seconds|_s)$")),
    ("share of tokens or rollouts", re.compile(r"_share$")),
)
MAX_LINES = 8
"""Of one chart; more are another chart."""
IDLE = {"step", "policy_version", "time"}

Records = Sequence[Mapping[str, Any]]


def series_of(records: Records) -> dict[str, list[tuple[float, float]]]:
    """Metric -> its finite points, in order."""
    found: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        for name, value in record.items():
            if name not in IDLE and isinstance(value, int | float) and "/" in name:
                found.setdefault(name, []).append((float(record["step"]), float(value)))
    return found


def grouped(series: Mapping[str, Points]) -> tuple[dict[str, dict[str, Points]], dict[str, Points]]:
    """(title -> its metrics, metrics of no group)."""
    groups: dict[str, dict[str, Points]] = {title: {} for title, _ in GROUPS}
    others: dict[str, Points] = {}
    for name, points in series.items():
        home = next((title for title, pattern in GROUPS if pattern.search(name)), None)
        (others if home is None else groups[home])[name] = points
    return {title: lines for title, lines in groups.items() if lines}, others


def curves(path: Path) -> Html:
    """Every metric of a metrics.jsonl: curves of what is looked at first, a table of the others.

    Raises:
        MetricsError: a damaged line in the middle; names it.
    """
    records = read_metrics(path)
    series = series_of(records)
    if not series:
        return tag("p", "no metrics yet", class_="dim")
    groups, others = grouped(series)
    images = []
    for title, lines in groups.items():
        names = list(lines)
        for start in range(0, len(names), MAX_LINES):
            images.append(chart(title, {name: lines[name] for name in names[start : start + MAX_LINES]}))
    rows = [[name, len(p), p[0][1], p[-1][1], min(y for _, y in p), max(y for _, y in p)] for name, p in others.items()]
    lost = sum(value is None for record in records for name, value in record.items() if "/" in name)
    return joined(
        [
            tag("div", *images, class_="charts"),
            tag("p", f"{lost} values were not finite and are not drawn", class_="dim") if lost else "",
            folded("other metrics", table(["metric", "points", "first", "last", "least", "most"], rows)),
        ]
    )


SLOTS = """
SELECT s.disposition AS disposition, coalesce(s.reason, '') AS reason, count(*) AS n,
  CASE WHEN last.attempt_id IS NULL THEN 'never played' ELSE coalesce(last.outcome, 'in flight') END AS outcome
FROM slots s LEFT JOIN attempts last ON last.attempt_id = coalesce(
  s.attempt_id, (SELECT attempt_id FROM attempts WHERE slot_id = s.slot_id ORDER BY number DESC LIMIT 1))
GROUP BY 1, 2, 4 ORDER BY 1, 2, 4
"""
ATTEMPTS = """
SELECT coalesce(outcome, 'in flight') AS outcome, coalesce(stop_reason, '') AS stop, count(*) AS n,
  avg(reward) AS reward FROM attempts GROUP BY 1, 2 ORDER BY 3 DESC
"""
AGES = """
SELECT u.step AS step, avg(u.step - 1 - json_extract(a.trajectory, '$.version_start')) AS mean,
  max(u.step - 1 - json_extract(a.trajectory, '$.version_start')) AS most
FROM uses u JOIN attempts a USING (attempt_id) JOIN steps t ON t.step = u.step WHERE t.state = 'committed'
GROUP BY u.step ORDER BY u.step
"""
STEPS = """
SELECT t.step AS step, t.committed_at AS committed, count(*) AS rollouts, sum(u.num_tokens) AS tokens
FROM steps t JOIN uses u USING (step) WHERE t.state = 'committed' GROUP BY t.step ORDER BY t.step
"""


def accounts(ledger: LedgerView) -> Html:
    """Slots by disposition and outcome, attempts by outcome and stop, how old what was trained was, and how fast it was."""
    slots = [[r["disposition"], r["reason"], r["outcome"], r["n"]] for r in ledger.rows(SLOTS)]
    attempts = [
        [r["outcome"], r["stop"], r["n"], "" if r["reward"] is None else r["reward"]] for r in ledger.rows(ATTEMPTS)
    ]
    images = [chart(title, lines) for title, lines in (*ages_of(ledger), *speed_of(ledger)) if lines]
    return joined(
        [
            section(
                "Slots, by what became of them and of their last attempt",
                table(["disposition", "reason", "outcome", "slots"], slots),
                level=3,
            ),
            section("Attempts", table(["outcome", "stop", "attempts", "mean reward"], attempts), level=3),
            tag("div", *images, class_="charts"),
        ]
    )


def ages_of(ledger: LedgerView) -> list[tuple[str, dict[str, Points]]]:
    """(title, lines) of what was trained in each optimizer step: versions since its rollouts began."""
    rows = ledger.rows(AGES)
    lines = {name: [(float(r["step"]), float(r[name])) for r in rows] for name in ("mean", "most")} if rows else {}
    return [("age of trained rollouts at their start (policy versions)", dict(lines))]


def speed_of(ledger: LedgerView) -> list[tuple[str, dict[str, Points]]]:
    """(title, lines) over the whole clock: from one committed step to the next, waiting included."""
    tokens, rollouts = [], []
    starts = [row["at"] for row in ledger.rows("SELECT at FROM events WHERE kind = 'checkpoint_loaded'")]
    for before, row in pairwise(ledger.rows(STEPS)):
        if any(before["committed"] <= at <= row["committed"] for at in starts):
            continue  # a resume lies between: the time it was down is no speed
        seconds = max(row["committed"] - before["committed"], 1e-3)
        tokens.append((float(row["step"]), row["tokens"] / seconds))
        rollouts.append((float(row["step"]), row["rollouts"] / seconds))
    if not tokens:
        return []
    return [
        ("throughput: trained tokens a second", {"tokens": tokens}),
        ("throughput: trained rollouts a second", {"rollouts": rollouts}),
    ]
