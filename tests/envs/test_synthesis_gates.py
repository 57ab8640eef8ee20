"""The gates in real shells: sound candidates pass, broken ones are rejected, and the tests see every step of a solution."""

import random
from dataclasses import replace

import pytest

from burnish.envs.config import Domain, SandboxConfig, SandboxKind
from burnish.envs.sandbox.base import SandboxError, open_sandboxes
from burnish.envs.synthesis.gates import GateReport, Gates
from burnish.envs.synthesis.generate import FAMILIES, generate
from burnish.envs.synthesis.spec import OracleTurn
from burnish.envs.synthesis.transcript import RecordedTurn, messages
from burnish.envs.synthesis.write import task_id, write_task
from burnish.envs.task import load_task
from burnish.verifiers.hidden_tests import HiddenTests

# difficulty 3 holds the plain form of its family
CASES = [(family, difficulty) for family in FAMILIES for difficulty in (2, 3)]


@pytest.fixture(scope="module")
def sandboxes():
    factory = open_sandboxes(SandboxConfig(), SandboxKind.local)
    yield factory
    factory.close()


@pytest.fixture
def grade(sandboxes, tmp_path):
    """The reward of a list of commands on a spec."""

    def run(spec, commands):
        task = load_task(write_task(spec, task_id(spec, 0), tmp_path))
        sandbox = sandboxes.create(task, role="agent", run_id="test", attempt_id="0")
        try:
            for command in commands:
                sandbox.run(command, 10.0)
            artifacts = sandbox.get_artifacts(task.config.artifacts)
        finally:
            sandbox.close()
        return HiddenTests(sandboxes).verify(task, artifacts, run_id="test", attempt_id="0").reward

    return run


@pytest.fixture
def check(sandboxes, tmp_path):
    """The gates' report on a spec."""

    def run(spec, gates=None):
        task = load_task(write_task(spec, task_id(spec, 0), tmp_path))
        return (gates or Gates(sandboxes, HiddenTests(sandboxes), "test")).check(task, spec.turns)

    return run


def spec_of(family, difficulty, seed=0):
    return generate(family, difficulty, random.Random(f"gates{seed}"))


@pytest.mark.parametrize(("family", "difficulty"), CASES)
def test_every_family_passes_its_gates(check, family, difficulty):
    spec = spec_of(family, difficulty)
    report = check(spec)
    assert report.accepted, report.reason
    assert (report.oracle_reward, report.nop_reward) == (1.0, 0.0)
    assert report.tests_run == sum(map(len, (spec.fixed_files, spec.absent, spec.functions, spec.retired)))
    assert report.turns == [RecordedTurn(command=turn.command, output=turn.output, exit_code=0) for turn in spec.turns]


@pytest.mark.parametrize("family", FAMILIES)
def test_leaving_out_any_step_that_acts_fails(grade, family):
    spec = spec_of(family, 3)
    commands = [turn.command for turn in spec.turns]
    for position, turn in enumerate(spec.turns):
        is_a_look = bool(turn.output)
        # `cp` into a directory that mkdir did not make writes a file of that name: still not what was asked
        mutant = commands[:position] + commands[position + 1 :]
        assert grade(spec, mutant) == (1.0 if is_a_look else 0.0), (turn.command, spec.instruction)


@pytest.mark.parametrize("family", FAMILIES)
def test_touching_every_name_in_sight_fails(grade, family):
    spec = spec_of(family, 2)
    names = sorted(spec.compounds)
    if FAMILIES[family].domain == Domain.terminal:
        assert grade(spec, [f"touch {name} {name}.txt" for name in names]) == 0.0
    # every compound as a line of every file
    write = f"echo {' '.join(names)} | tr ' ' '\\n' | tee"
    assert grade(spec, [f"{write} {name}.txt {name}.py" for name in names]) == 0.0


@pytest.mark.parametrize(
    ("family", "other"),
    [
        ("write-line", "printf '%s' {1} > {3}"),
        ("append-line", "printf '%s\\n' {1} | tee -a {3}"),
        ("sort-lines", "cat {1} | LC_ALL=C sort > ../x && mv ../x {3}"),
        ("copy-file", "cat {1} > {2}"),
        ("rename-file", "cp {1} {2} && rm {1}"),
        ("delete-file", "mkdir -p ../bin && mv {1} ../bin"),
        ("find-line", "sed -n '/{1}/p' {2} > {4}"),
        ("edge-lines", "cat {3} | {0} -n1 | tee {5}"),
        ("join-files", "cp {1} {4}; cat {2} >> {4}"),
    ],
)
def test_another_way_to_the_same_state_passes(grade, family, other):
    spec = spec_of(family, 1)
    words = spec.turns[0].command.split()
    assert grade(spec, [other.format(*words)]) == 1.0, (other.format(*words), spec.instruction)


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("write-line", "echo {1} > wrong-name.txt"),
        ("write-line", "touch {3}"),
        ("write-line", "echo {1} > {3}; echo more >> {3}"),
        ("write-line", "echo x{1} > {3}"),
        ("write-line", "ln -s /etc/hostname {3}"),
        ("append-line", "echo {1} > {3}"),
        ("sort-lines", "cp {1} {3}"),
        ("sort-lines", "sort -r {1} > {3}"),
        ("rename-file", "cp {1} {2}"),
        ("delete-file", "rm *.txt"),
        ("delete-file", "> {1}"),
        ("find-line", "cat {2} > {4}"),
        ("edge-lines", "cat {3} > {5}"),
        ("join-files", "cat {2} {1} > {4}"),
        ("copy-file", "mv {1} {2}"),
        ("copy-file", "cp {1} {2}; echo more >> {1}"),
    ],
)
def test_a_shortcut_fails(grade, family, wrong):
    spec = spec_of(family, 1)
    words = spec.turns[0].command.split()
    assert grade(spec, [wrong.format(*words)]) == 0.0, (wrong.format(*words), spec.instruction)


def test_a_broken_oracle_is_rejected(check):
    spec = spec_of("write-line", 1)
    broken = replace(spec, turns=(OracleTurn(command="echo wrong > wrong.txt", output=""),))
    assert check(broken).reason == "oracle: its solution earns a reward of 0, not 1"


def test_an_oracle_command_that_fails_is_rejected(check):
    spec = spec_of("write-line", 1)
    broken = replace(spec, turns=(OracleTurn(command="cat no-such.txt", output=""), *spec.turns))
    assert "ended with exit code 1" in check(broken).reason


def test_an_oracle_that_prints_something_else_is_rejected(check):
    spec = spec_of("count-lines", 1)
    look, act = spec.turns
    assert "printed" in check(replace(spec, turns=(replace(look, output="0\n"), act))).reason


def test_a_task_that_doing_nothing_solves_is_rejected(check):
    spec = spec_of("copy-file", 1)
    # the hidden tests look only at what was there before
    report = check(replace(spec, expected=spec.files))
    assert report.reason == "nop: doing nothing earns a reward of 1"
    assert report.oracle_reward == 1
    assert not report.accepted


def test_tests_without_a_verdict_are_rejected(sandboxes, tmp_path):
    spec = spec_of("copy-file", 1)
    folder = write_task(spec, task_id(spec, 0), tmp_path)
    (folder / "tests" / "check.py").write_text("raise SystemExit('broken')\n")
    report = Gates(sandboxes, HiddenTests(sandboxes), "test").check(load_task(folder), spec.turns)
    assert report.reason.startswith("oracle: the tests gave no verdict")


class FlakyGrader:
    """Fails as an engine under load does, then grades as the inner one."""

    def __init__(self, inner, failures):
        self.inner, self.failures = inner, failures

    def verify(self, *args, **kwargs):
        if self.failures:
            self.failures -= 1
            raise SandboxError("the engine does not answer")
        return self.inner.verify(*args, **kwargs)


def test_a_failing_engine_is_no_verdict(sandboxes, check):
    spec = spec_of("copy-file", 1)
    assert check(spec, Gates(sandboxes, FlakyGrader(HiddenTests(sandboxes), 2), "test")).accepted
    with pytest.raises(SandboxError):
        check(spec, Gates(sandboxes, FlakyGrader(HiddenTests(sandboxes), 3), "test"))


def test_a_report_survives_json(check):
    report = check(spec_of("look-up", 2))
    assert GateReport.from_json(report.to_json()) == report


def plain(message):
    return {"role": message.role.value, "content": message.content}


def test_messages_are_what_the_bash_harness_would_say(sandboxes, tmp_path):
    bash = pytest.importorskip("burnish.rollout.harness.bash")
    spec = spec_of("follow-note", 1)
    task = load_task(write_task(spec, task_id(spec, 0), tmp_path))
    harness = bash.BashHarness()
    sandbox = sandboxes.create(task, role="agent", run_id="test", attempt_id="0")
    chat, turns = [], []
    said = list(harness.opening(task))
    try:
        for command in [*task.solution_lines(), "cat no-such.txt"]:
            result = sandbox.run(command, 10.0)
            turns.append(RecordedTurn(command=command, output=result.output, exit_code=result.exit_code))
            chat += [{"role": "assistant", "content": command}, plain(harness.observe(result))]
    finally:
        sandbox.close()
    assert messages(task.instruction, turns)[:-1] == [plain(message) for message in said] + chat
    assert turns[-1].exit_code != 0
    assert isinstance(harness.parse(messages(task.instruction, turns)[-1]["content"]), bash.Finish)
