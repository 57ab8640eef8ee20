"""burnish report RUN: one HTML page of a run, whatever kind of run it is and however far it came. Reads only.

Everything is in the page: tables, charts, examples, settings, lineage. A part that cannot be read says so in its place,
and the rest is shown. Run again, it shows what has come since.
"""

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from burnish.envs.errors import UserError
from burnish.policy.checkpoint.whole_files import write_text
from burnish.rollout.config import ReportRun
from burnish.rollout.ledger_schema import LedgerError
from burnish.rollout.ledger_view import LedgerView
from burnish.rollout.page.examples import examples_section, from_ledger, from_lines
from burnish.rollout.page.folder import Part, parts_of, read_json
from burnish.rollout.page.markup import Html, folded, joined, page, pre, section, table, tag
from burnish.rollout.page.results import results_section
from burnish.rollout.page.training import accounts, curves

logger = logging.getLogger(__name__)

MAX_SETTINGS = 60_000
"""Characters of a config.yaml that are shown."""
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, OSError, LedgerError, sqlite3.DatabaseError)
"""What reading a file that is not what was written can end in."""


def main(config: ReportRun) -> int:
    """Writes the page and says where it is."""
    run = Path(config.run)
    out = Path(config.out) if config.out else run / "report" / "index.html"
    write_page(run, out)
    logger.info("Report of %s: %s", run, out)
    return 0


def write_page(run: Path, out: Path) -> None:
    """The page of a run, written whole or not at all.

    Raises:
        UserError: the folder is no run, or `out` is a folder.
    """
    text = page_of(run)
    if out.is_dir():
        raise UserError(f"out={out} is a folder: name a file in it, such as {out / 'index.html'}")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)


def page_of(run: Path) -> str:
    """The page's HTML.

    Raises:
        UserError: the folder is no run.
    """
    parts = parts_of(run)
    own = parts[0]
    shown: list[object] = [tag("h1", f"Run {own.name}"), overview(run, parts)]
    if any(part.is_evaluation for part in parts):
        shown.append(guarded("Results", lambda: results_section(parts)))
    shown += [part_section(part, is_own=part is own) for part in parts]
    shown.append(section("Lineage", guarded("Lineage", lambda: lineage(parts))))
    shown.append(section("Settings", *(settings(part) for part in parts)))
    return page(f"burnish: {own.name}", *shown)


def guarded(what: str, make: Callable[[], Html]) -> Html:
    """A section, or the sentence that says why there is none: damage in one file hides no other."""
    try:
        return make()
    except DAMAGE as error:
        logger.warning("%s cannot be shown: %s", what, error)
        return tag("p", f"{what} cannot be shown: {error or type(error).__name__}", class_="bad")


def overview(run: Path, parts: Sequence[Part]) -> Html:
    """What the folder is, how far it is, and since when nothing was written."""
    rows = []
    for part in parts:
        kinds = [name for name, holds in kinds_of(part).items() if holds]
        rows.append([part.name, ", ".join(kinds), part.state, last_write(part)])
    totals = parts[0].totals
    names = ("containers", "episodes", "tokens_trained", "seconds")
    facts = ", ".join(f"{totals[name]:,} {name.replace('_', ' ')}" for name in names if name in totals)
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return joined(
        [
            tag("p", f"{run.resolve()}, as of {made}", class_="dim"),
            table(["folder", "what", "state", "last written"], rows),
            tag("p", f"In all: {facts}.") if facts else "",
        ]
    )


def kinds_of(part: Part) -> dict[str, bool]:
    stage = str(part.manifest.get("stage", "training"))
    return {"pipeline": part.is_pipeline, stage: part.is_training, "evaluation": part.is_evaluation}


def last_write(part: Part) -> str:
    names = ("metrics.jsonl", "ledger.sqlite", "ledger.sqlite-wal", "results.jsonl", "stages/attempts.jsonl")
    times = [(part.path / name).stat().st_mtime for name in (*names, "manifest.json") if part.has(name)]
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(max(times))) if times else ""


def part_section(part: Part, is_own: bool) -> Html:
    """Curves, accounts and examples of one folder; nothing where it has none of them."""
    shown: list[object] = []
    if part.has("metrics.jsonl"):
        shown.append(guarded("Curves", lambda: curves(part.path / "metrics.jsonl")))
    if part.has("ledger.sqlite"):
        shown.append(guarded("The ledger", lambda: from_the_ledger(part)))
    if part.has("trajectories.jsonl"):
        path = part.path / "trajectories.jsonl"
        shown.append(guarded("Examples", lambda: examples_section(part, from_lines(path))))
    if not shown:
        return Html("")
    return section(f"{'This run' if is_own else part.name}", *shown)


def from_the_ledger(part: Part) -> Html:
    ledger = LedgerView.open(part.path / "ledger.sqlite")
    try:
        return joined([accounts(ledger), guarded("Examples", lambda: examples_section(part, from_ledger(ledger)))])
    finally:
        ledger.close()


def lineage(parts: Sequence[Part]) -> Html:
    """Which hashes went into a stage and which came out: equal hashes link the rows."""
    rows = []
    for name, stage in (read_json(parts[0].path / "manifest.json").get("stages") or {}).items():
        # of a pipeline, in the order its stages ended
        made = {
            kind: ", ".join(f"{path} {str(h)[:12]}" for path, h in stage[kind].items())
            for kind in ("parents", "output")
        }
        rows.append([name, stage["verb"], "", made["parents"], made["output"], ""])
    for part in parts:
        if part.manifest:
            parents = ", ".join(f"{name} {str(digest)[:12]}" for name, digest in part.manifest["parents"].items())
            result = str(part.manifest.get("policy", ""))[:12]
            code = part.manifest.get("code", "")
            rows.append([part.name, part.manifest["stage"], code, parents, result, part.manifest.get("steps", "")])
        elif part.conditions:
            facts = {"policy": part.conditions.get("policy"), "tasks": part.conditions["task_set"]}
            parents = ", ".join(f"{name} {digest[:12]}" for name, digest in facts.items() if digest)
            rows.append([part.name, "eval", "", parents, "", ""])
    return table(["stage or folder", "verb", "code", "made from", "what came out", "steps"], rows)


def settings(part: Part) -> Html:
    """config.yaml and the small JSON files of a folder, as they stand."""
    shown: list[object] = []
    path = part.path / "config.yaml"
    if path.is_file():
        shown.append(guarded("config.yaml", lambda: pre(path.read_text("utf-8", "replace"), limit=MAX_SETTINGS)))
    for name in ("manifest.json", "conditions.json", "policy/burnish.json"):
        if found := read_json(part.path / name):
            shown += [tag("p", name), pre(json.dumps(found, indent=1), limit=MAX_SETTINGS)]
    return folded(part.name, *shown) if shown else Html("")
