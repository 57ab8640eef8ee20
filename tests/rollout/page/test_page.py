"""The page of a run: what it shows, that it is whole by itself, and that nothing in a run gets out of its place."""

import base64
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_folders import HOSTILE, trajectory, write_eval, write_rl

from burnish.configs.cli import main
from burnish.rollout.ledger import Ledger
from burnish.rollout.page.build import page_of
from burnish.rollout.page.folder import parts_of
from burnish.rollout.page.markup import escaped, joined, page, pre, table, tag
from burnish.rollout.page.results import evaluations_of, gains_of
from burnish.rollout.types import Slot

KNOWN = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "table", "tr", "th", "td", "pre", "div",
         "img", "details", "summary"}  # fmt: skip
VOID = {"meta", "img"}
LISTED = {"class", "src", "alt", "charset", "content", "http-equiv", "name", "lang"}


class Reader(HTMLParser):
    """What a browser sees: tags, their attributes, and text by the tag it stands in."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.stack: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.stack, f"left open: {self.stack}"

    def handle_starttag(self, name, attributes):
        self.tags.add(name)
        self.attributes += [(name, key, value) for key, value in attributes]
        if name not in VOID:
            self.stack.append(name)
            self.texts.append((name, ""))

    def handle_endtag(self, name):
        assert self.stack.pop() == name, f"</{name}> closes something else"

    def handle_data(self, data):
        if self.stack:
            self.texts.append((self.stack[-1], data))

    def of(self, name: str) -> list[str]:
        return [text for tag_name, text in self.texts if tag_name == name and text]

    @property
    def words(self) -> str:
        return " ".join(" ".join(text.split()) for name, text in self.texts if name != "style" and text.strip())


def read(text: str) -> Reader:
    """The page, once it is known to be harmless."""
    found = Reader(text)
    assert found.tags <= KNOWN, found.tags - KNOWN
    assert {key for _, key, _ in found.attributes} <= LISTED
    for name, key, value in found.attributes:
        if key == "src":
            assert (name, str(value).startswith("data:image/svg+xml;base64,")) == ("img", True)
    assert not re.search(r"https?://", re.sub(r"base64,[\w+/=]+", "", text)), "nothing from elsewhere"
    return found


def images(found: Reader) -> list[ElementTree.Element]:
    data = [value.partition("base64,")[2] for _, key, value in found.attributes if key == "src" and value]
    roots = [ElementTree.fromstring(base64.b64decode(part)) for part in data]
    for root in roots:
        names = {element.tag.rpartition("}")[2] for element in root.iter()}
        assert not names & {"script", "foreignObject", "image", "a"}, names
    return roots


def test_a_killed_rl_run(rl):
    found = read(page_of(rl))
    for words in (
        "rl not finished: stopped, or killed",
        "trained finished 4",
        "dropped zero_variance finished 2",
        "pending infra_failed 1",
        "pending never played 1",
        "infra_failed sandbox_error 1",
        "first passed: task-0, slot 000-000000-001",
        "last passed: task-2, slot 000-000002-001",
        "first failed: task-0, slot 000-000000-000",
        "last failed: task-2, slot 000-000002-000",
        "values were not finite",
        "policy aaaaaaaaaaaa",
    ):
        assert words in found.words, words
    titles = [value for _, key, value in found.attributes if key == "alt"]
    for title in ("reward", "loss", "entropy (nats)", "gradient norm", "KL of engine and trainer, and other KL"):
        assert title in titles
    assert "age of trained rollouts at their start (policy versions)" in titles
    assert "throughput: trained tokens a second" in titles
    assert len(images(found)) == len(titles)
    # what no curve shows is in the table
    assert "train/lr 2 0.001 0.001 0.001 0.001" in found.words


def test_a_run_that_grades_nothing_shows_what_was_said(tmp_path, no_charts):
    ledger = Ledger(tmp_path / "distill" / "ledger.sqlite")
    slots = [Slot(task_id=f"task-{i}", group_index=i, member=0) for i in range(3)]
    ledger.add_slots(slots)
    for slot in slots:
        played = trajectory(slot, ledger.open_attempt(slot.slot_id), 0.0, f"echo {slot.task_id}")
        ledger.close_attempt(replace(played, verdict=None, is_graded=False))
    ledger.close()
    words = read(page_of(tmp_path / "distill")).words
    assert "ready finished 3" in words
    assert "first ungraded: task-0, slot 000-000000-000" in words
    assert "last ungraded: task-2, slot 000-000002-000" in words
    assert "echo task-2" in words


def test_a_run_that_is_going_on(tmp_path, no_charts):
    ledger = write_rl(tmp_path / "rl")
    try:
        assert "rl going on" in read(page_of(tmp_path / "rl")).words
    finally:
        ledger.close()
    assert "rl not finished: stopped, or killed" in read(page_of(tmp_path / "rl")).words
    # looking takes nothing from the run: it can be gone on with
    write = subprocess.run(
        [sys.executable, "-c", f"from burnish.rollout.ledger import Ledger; from pathlib import Path;"
         f"Ledger(Path({str(tmp_path / 'rl' / 'ledger.sqlite')!r})).close()"], capture_output=True, text=True,
    )  # fmt: skip
    assert write.returncode == 0, write.stderr


def test_a_pipeline_in_the_order_it_ran(pipeline, no_charts):
    evaluations = evaluations_of(parts_of(pipeline))
    assert [evaluation.stage for evaluation in evaluations] == ["base", "sft", "alast"]
    gains = gains_of(evaluations)
    assert [(name, domain, gain.mean, gain.n) for name, domain, gain in gains] == [
        ("sft-base", "terminal", 0.5, 10),
        ("alast-sft", "terminal", 0.0, 4),
    ]
    found = read(page_of(pipeline))
    for words in (
        "pipeline pipeline not finished",
        "base terminal 0.000 [0.000, 0.278] 10 0",
        "sft terminal 0.500 [0.237, 0.763] 10 0",
        "alast terminal 1.000 [0.510, 1.000] 4 1 not finished: episodes so far",
        "sft-base terminal +0.500",
        "eval/base",
        "init init base/model.safetensors dddddddddddd",
        "policy dddddddddddd aaaaaaaaaaaa 1",
    ):
        assert words in found.words, words


def test_gains_that_a_pipeline_has_named_itself(pipeline, no_charts):
    (pipeline / "report").mkdir()
    gain = {"terminal": {"mean": -0.02, "lo": -0.05, "hi": 0.01}}
    summary = {"stages": {}, "gains": {"sft-base": gain, "distill-specialist": gain}, "containers": 12, "seconds": 61.0}
    (pipeline / "report" / "summary.json").write_text(json.dumps(summary))
    words = read(page_of(pipeline)).words
    assert "distill-specialist terminal -0.020 [-0.050, +0.010] no" in words
    assert words.count("sft-base") == 1
    assert "In all: 12 containers, 61.0 seconds." in words


def test_hostile_text_stays_text(tmp_path):
    run = tmp_path / "run"
    write_rl(run / "rl", HOSTILE).close()
    write_eval(run / "eval", [True, False], stage=HOSTILE, written=1.0, text=HOSTILE)
    (run / "stages").mkdir()
    (run / "stages" / "attempts.jsonl").write_text("")
    text = page_of(run)
    found = read(text)  # no tag, attribute or end of a tag that is not ours
    assert "<script" not in text
    shown = HOSTILE.replace("\x1b", "\ufffd").replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    assert found.of("pre").count(f"\n{shown}") >= 4, "said, heard, what the tests wrote: to the letter"
    assert shown in found.of("td")
    text.encode("utf-8")
    images(found)


def test_nothing_is_taken_for_markup_by_accident():
    assert escaped("<b>") == "&lt;b&gt;"
    assert tag("p", "<b>", class_='"x') == '<p class="&quot;x">&lt;b&gt;</p>'
    assert joined(["<", tag("p", "a")], " ") == "&lt; <p>a</p>"
    assert escaped(tag("p", "a") + "<b>") != "<p>a</p><b>", "markup and text together are text"
    assert "&lt;i&gt;" in table(["<i>"], [["<i>"]])
    assert Reader(page("</title><script>", "x")).tags <= KNOWN


@pytest.mark.parametrize("text", ["\nfirst line is empty", "a\r\nb\rc", "tab\there", "last\n"])
def test_text_is_shown_as_it_stands(text):
    shown = "".join(Reader(pre(text)).of("pre"))
    # the reader of a page swallows the newline right after <pre>, this one does not
    assert shown == "\n" + text.replace("\r\n", "\n").replace("\r", "\n")


def test_long_text_loses_its_middle():
    shown = pre("a" * 5_000 + "b" * 5_000, limit=1_000)
    assert "[9000 characters left out]" in shown
    assert len(shown) < 1_200


def test_damage_is_told_in_its_place_and_hides_nothing_else(rl, no_charts):
    lines = (rl / "metrics.jsonl").read_text().splitlines(keepends=True)
    (rl / "metrics.jsonl").write_text("".join([lines[0].replace('"step": 1', '"step": 7'), *lines[1:]]))
    found = read(page_of(rl))
    assert "Curves cannot be shown" in found.words
    assert "line 1 is damaged" in found.words
    assert "trained finished 4" in found.words
    (rl / "ledger.sqlite").write_bytes(b"no database" * 500)
    (rl / "config.yaml").write_bytes(b"\xff\xfe: [")
    for name in ("ledger.sqlite-wal", "ledger.sqlite-shm"):
        (rl / name).unlink(missing_ok=True)
    found = read(page_of(rl))
    assert "The ledger cannot be shown" in found.words
    assert "policy aaaaaaaaaaaa" in found.words


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: (run / "eval" / "base" / "results.jsonl").write_text('{"task": 1}\n'),
        lambda run: (run / "eval" / "base" / "trajectories.jsonl").write_text('{"verdict": {"reward": 1}}\n[]\nx'),
        lambda run: (run / "eval" / "base" / "summary.json").write_text('{"domains": {}, "written": "x"}'),
        lambda run: (run / "rl" / "manifest.json").write_text('{"stage": 1, "parents": {"a": null}}'),
        lambda run: (run / "stages" / "attempts.jsonl").write_bytes(b"\xff\n[1]\n"),
    ],
    ids=range(5),
)
def test_damage_of_any_form_is_no_crash(pipeline, damage, no_charts):
    damage(pipeline)
    assert "sft" in read(page_of(pipeline)).words


def test_the_command_writes_one_file(rl, capsys, no_charts):
    assert main(["report", str(rl)]) == 0
    before = {path.name for path in rl.iterdir()} - {"report"}
    # SQLite makes two files of its own beside a ledger that is read
    assert before <= {"config.yaml", "manifest.json", "metrics.jsonl"} | {p.name for p in rl.glob("ledger.sqlite*")}
    assert [path.name for path in (rl / "report").iterdir()] == ["index.html"]
    assert (rl / "report" / "index.html").read_text().startswith("<!DOCTYPE html>")
    # again, and elsewhere
    assert main(["report", str(rl), f"out={rl / 'else' / 'page.html'}"]) == 0
    assert main(["report", str(rl)]) == 0


def foreign(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"name": "a web page", "icons": []}')
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n')
    (folder / "summary.json").write_text("[]")
    (folder / "results.jsonl").write_text("{}\n")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: shutil.rmtree(path), "no folder of a run at"),
        (lambda path: None, "holds nothing of a run: no ledger.sqlite"),
        (foreign, "holds nothing of a run: no ledger.sqlite"),
        (
            lambda path: write_rl(path / "mine").close(),
            "is no run itself, but holds 1 folders of runs: give one, such as",
        ),
    ],
    ids=["missing", "empty", "foreign", "above"],
)
def test_a_folder_that_is_no_run(tmp_path, capsys, make, says):
    folder = tmp_path / "folder"
    folder.mkdir()
    make(folder)
    before = sorted(path.name for path in folder.iterdir()) if folder.exists() else None
    assert main(["report", str(folder)]) == 2
    complaint = capsys.readouterr().err.strip().splitlines()[-1]
    assert complaint.startswith("burnish report: ")
    assert says in complaint
    assert (sorted(path.name for path in folder.iterdir()) if folder.exists() else None) == before


@pytest.mark.parametrize(("words", "says"), [(["run="], "run must not be empty"), ([], "run is required")])
def test_the_run_has_to_be_named(words, says, capsys):
    assert main(["report", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_folder_where_the_file_is_due(rl, tmp_path, capsys, no_charts):
    assert main(["report", str(rl), f"out={tmp_path}"]) == 2
    assert "is a folder: name a file in it" in capsys.readouterr().err
