"""burnish new: what it makes really runs, and what it refuses leaves everything as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.configs.cli import main
from burnish.configs.scaffold import TEMPLATES
from burnish.envs.synthesis.gates import Gates
from burnish.envs.task import load_task
from burnish.verifiers.hidden_tests import HiddenTests


def passed(out: Path) -> float:
    return json.loads((out / "summary.json").read_text())["all"]["pass"]


def test_a_task_passes_its_gates(tmp_path, sandboxes):
    assert main(["new", "task", "count-words", f"out={tmp_path}"]) == 0
    task = load_task(tmp_path / "count-words")
    assert "TASK-NAME" not in "".join(p.read_text() for p in task.path.rglob("*") if p.is_file())
    oracle = sandboxes.create(task, role="agent", run_id="scaffold", attempt_id="oracle")
    try:
        untouched = oracle.get_artifacts(task.config.artifacts)
        for line in task.solution_lines():
            assert oracle.run(line, 20).exit_code == 0
        solved = oracle.get_artifacts(task.config.artifacts)
        assert oracle.run("rm words.txt", 20).exit_code == 0
        destroyed = oracle.get_artifacts(task.config.artifacts)
    finally:
        oracle.close()
    grader = HiddenTests(sandboxes)
    verdicts = [
        grader.verify(task, artifacts, run_id="scaffold", attempt_id=f"grade-{index}")
        for index, artifacts in enumerate((solved, untouched, destroyed))
    ]
    assert [(v.reward, v.tests_passed, v.tests_run) for v in verdicts] == [(1, 2, 2), (0, 1, 2), (0, 1, 2)]
    # the gates of synthesis, which also look at what the oracle prints
    report = Gates(sandboxes, grader, "scaffold").check(task, turns_of(task))
    assert (report.accepted, report.reason) == (True, "")


def turns_of(task):
    from burnish.envs.synthesis.spec import OracleTurn

    return tuple(OracleTurn(command=line, output="") for line in task.solution_lines())


def test_the_next_commands_it_prints_do_what_they_say(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "task", "count-words"]) == 0
    printed = capsys.readouterr().out
    for agent, share in (("oracle", 1.0), ("nop", 0.0)):
        (command,) = [line.split("burnish ")[1] for line in printed.splitlines() if f"agent={agent}" in line]
        assert main([*command.split(), "sandbox=local", f"out={agent}"]) == 0
        assert passed(tmp_path / agent) == share


@pytest.mark.parametrize("kind", ["verifier", "harness"])
def test_a_plug_in_is_found_by_its_import_path_and_passes_its_own_tests(tmp_path, capsys, kind):
    out = tmp_path / "mine"
    assert main(["new", "task", "count-words", f"out={tmp_path / 'tasks'}"]) == 0
    assert main(["new", kind, f"my_{kind}", f"out={out}"]) == 0
    printed = capsys.readouterr().out
    class_name = f"My{kind.capitalize()}"
    assert f"class {class_name}" in (out / f"my_{kind}.py").read_text()
    for path in out.iterdir():
        assert "templates" not in path.read_text()
        assert f"New{kind.capitalize()}" not in path.read_text()
    environment = {**os.environ, "PYTHONPATH": str(out), "OMP_NUM_THREADS": "1"}
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(out)],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert tests.returncode == 0, tests.stdout + tests.stderr
    (line,) = [line for line in printed.splitlines() if line.startswith("use it: ")]
    words = line.split("burnish ")[1].replace("DIR", str(tmp_path / "tasks")).split()
    done = subprocess.run(
        [sys.executable, "-m", "burnish.configs.cli", *words, "sandbox=local", f"out={tmp_path / 'eval'}"],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert passed(tmp_path / "eval") == 1.0
    conditions = json.loads((tmp_path / "eval" / "conditions.json").read_text())
    assert conditions[kind] == f"my_{kind}:{class_name}"


@pytest.mark.parametrize("kind", ["verifier", "harness"])
def test_the_templates_pass_their_tests_where_they_lie(kind):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TEMPLATES / f"test_{kind}.py")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["task", "Count Words"], "name 'Count Words' must be kebab-case"),
        (["task", "Count Words"], "such as 'count-words'"),
        (["task", "count_words"], "such as 'count-words'"),
        (["task", "../count"], "such as 'count'"),
        (["task", "name=-count"], "must be kebab-case"),
        (["task", "x" * 101], "at most 100 characters"),
        (["task", "\u6570"], "must be kebab-case"),
        (["task", ""], "name must not be empty"),
        (["verifier", "my-verifier"], "such as 'my_verifier'"),
        (["verifier", "MyVerifier"], "must be a Python module in snake_case"),
        (["harness", "2nd"], "such as 'nd'"),
        (["harness", "class"], "'class' cannot be a module of its own"),
        (["harness", "test_mine"], "'test_mine' cannot be a module of its own"),
        (["harness", "json"], "is that of a module that can be imported already"),
        (["verifier", "burnish"], "is that of a module that can be imported already"),
        (["judge", "mine"], "kind: expected task|verifier|harness, got 'judge'"),
        (["task"], "name is required"),
        ([], "kind is required"),
    ],
)
def test_a_name_that_cannot_be_one(words, says, tmp_path, capsys):
    assert main(["new", *words, f"out={tmp_path / 'out'}"]) == 2
    complaint = capsys.readouterr().err
    assert says in complaint
    assert complaint.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "name", "taken"),
    [
        ("task", "mine", "mine"),
        ("verifier", "mine_too", "mine_too.py"),
        ("harness", "mine_too", "test_mine_too.py"),
    ],
)
def test_nothing_is_overwritten(kind, name, taken, tmp_path, capsys):
    (tmp_path / taken).write_text("mine")
    assert main(["new", kind, name, f"out={tmp_path}"]) == 2
    assert f"{tmp_path / taken} is there already" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {taken}
    assert (tmp_path / taken).read_text() == "mine"


def test_a_file_where_the_folder_is_due(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main(["new", "task", "mine", f"out={tmp_path / 'file'}"]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
