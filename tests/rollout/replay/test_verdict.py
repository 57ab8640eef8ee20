"""Grading again: the same commands in a fresh sandbox, and what is said when that is not what it was."""

import json
from dataclasses import replace

import pytest
from fakes import FileVerifier, MemorySandboxes

from burnish.envs.config import SandboxKind
from burnish.envs.prompts.config import PromptData
from burnish.envs.prompts.promptset import load_prompts
from burnish.envs.taskset import load_taskset
from burnish.rollout.config import ReplayRun, RlRun
from burnish.rollout.replay import verdict
from burnish.rollout.replay.run import sandbox_of
from burnish.rollout.replay.verdict import regrade
from burnish.rollout.types import Slot, StopReason, Trajectory, Turn
from burnish.verifiers.types import Outcome, Verdict

HELLO = Turn(index=0, context_id="0", action="echo hello > out.txt", observation="<output>\n</output>", exit_code=0)
LEAVE = Turn(index=1, context_id="0", action="exit")


@pytest.fixture
def source(make_task):
    """A run over one task, which is solved by writing hello to out.txt, and the hash of its task set."""
    folder = make_task("say-hello").parent
    run = RlRun(tasks=str(folder), policy="none", name="run", sandbox=SandboxKind.local)
    return run, load_taskset(folder).content_hash


def attempt(turns, reward: float = 1.0, outcome: Outcome = Outcome.finished, artifacts_hash: str = "") -> Trajectory:
    passed = int(reward)
    graded = Verdict(
        reward=reward, rewards={"reward": reward}, tests_run=1, tests_passed=passed, log="", duration_s=0.1,
        artifacts_hash=artifacts_hash,
    )  # fmt: skip
    slot = Slot(task_id="say-hello", group_index=0, member=0)
    return Trajectory(
        slot=slot, attempt_id="000-000000-000-00", outcome=outcome, stop_reason=StopReason.exit, turns=tuple(turns),
        verdict=graded if outcome.has_reward else None,
    )  # fmt: skip


def test_the_same_commands_earn_the_same(source):
    run, task_set = source
    found = regrade(run, attempt([HELLO, LEAVE]), task_set)
    assert found is not None
    assert (found.is_equal, found.problem, found.turns_played, found.turns_that_differ) == (True, "", 1, [])
    assert found.recorded == found.again
    assert found.same_artifacts is None
    again = regrade(run, attempt([LEAVE], reward=0.0), task_set)
    assert again is not None
    assert (again.is_equal, again.turns_played) == (True, 0)


def test_another_verdict_and_other_artifacts_are_told(source):
    run, task_set = source
    found = regrade(run, attempt([HELLO, LEAVE], reward=0.0, artifacts_hash="0" * 64), task_set)
    assert found is not None
    assert not found.is_equal
    assert found.differences["reward"] == (0.0, 1.0)
    assert found.differences["tests_passed"] == (0, 1)
    assert found.same_artifacts is False


def test_a_command_that_now_prints_something_else_is_told(source):
    run, task_set = source
    chance = replace(HELLO, index=1, action="echo $RANDOM$RANDOM", observation="<output>\n1\n</output>")
    found = regrade(run, attempt([HELLO, chance, LEAVE]), task_set)
    assert found is not None
    assert (found.is_equal, found.turns_that_differ, found.turns_played) == (True, [1], 2)


def test_turns_that_were_cut_or_came_too_late_are_not_run(source):
    run, task_set = source
    cut = replace(HELLO, finish_reason="max_tokens", observation="", exit_code=None)
    late = replace(HELLO, observation="", exit_code=None)
    for turn in (cut, late):
        found = regrade(run, attempt([turn], reward=0.0, outcome=Outcome.budget_exhausted), task_set)
        assert found is not None
        assert (found.is_equal, found.turns_played) == (True, 0)


def test_an_agent_that_took_its_machine_down(source, monkeypatch):
    """In sandboxes in memory: a command that ends its machine has no place in a test that could reach a real one."""
    run, task_set = source
    monkeypatch.setattr(verdict, "open_machines", lambda run: MemorySandboxes())
    monkeypatch.setattr(verdict, "open_verifier", lambda run, sandboxes: FileVerifier("/app/out.txt", "hello\n"))
    for action, again in (("crash", "agent_crashed_env"), ("false", "not agent_crashed_env")):
        crash = Turn(index=0, context_id="0", action=action, observation="", exit_code=None)
        recorded = attempt([crash], reward=0.0, outcome=Outcome.agent_crashed_env)
        assert recorded.verdict is not None
        recorded = replace(recorded, verdict=replace(recorded.verdict, rewards={}, tests_run=0))
        found = regrade(run, recorded, task_set)
        assert found is not None
        assert found.again is not None
        assert (found.again["outcome"], found.is_equal) == (again, action == "crash")
        assert found.turns_played == 1


def test_commands_are_not_run_on_this_machine_unasked(source):
    run, task_set = source
    limits = replace(run.limits, engine_url="tcp://127.0.0.1:9")
    for asked, recorded, chosen in (("auto", "auto", "docker"), ("auto", "local", "local"), ("local", "auto", "local")):
        config = ReplayRun(run="r", slot="s", sandbox=SandboxKind(asked))
        assert sandbox_of(config, replace(run, sandbox=SandboxKind(recorded))) == chosen
    found = regrade(replace(run, sandbox=SandboxKind.docker, limits=limits), attempt([HELLO, LEAVE]), task_set)
    assert found is not None
    assert (found.is_equal, found.turns_played) == (False, 0)
    assert found.problem.startswith("its commands cannot be run again: sandbox=docker needs a Docker engine")


@pytest.mark.parametrize(("said", "reward", "is_equal"), [("4", 1.0, True), ("5", 0.0, True), ("5", 1.0, False)])
def test_a_completion_is_graded_as_the_ledger_holds_it(tmp_path, said, reward, is_equal):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "2 + 2 =", "answer": "4"}) + "\n")
    run = RlRun(data=PromptData(path=str(path)), policy="none", name="run", verifier="exact")
    prompts = load_prompts(run.data)
    recorded = attempt([Turn(index=0, context_id="0", action=said)], reward=reward)
    recorded = replace(recorded, slot=replace(recorded.slot, task_id=prompts.tasks[0].id))
    found = regrade(run, recorded, prompts.content_hash)
    assert found is not None
    assert (found.problem, found.turns_played) == ("", 0)
    assert found.how == "the completion, as the ledger holds it"
    assert found.is_equal == is_equal
    assert found.again is not None
    assert found.again["reward"] == float(said == "4")


def test_without_a_verdict_there_is_nothing_to_compare(source):
    run, task_set = source
    assert regrade(run, attempt([HELLO], outcome=Outcome.infra_failed), task_set) is None


def test_tasks_that_changed_say_nothing(source, make_task):
    run, task_set = source
    make_task("say-hello", {"instruction.md": "Write something else\n"})
    found = regrade(run, attempt([HELLO, LEAVE]), task_set)
    assert found is not None
    assert (found.is_equal, "have changed" in found.problem) == (False, True)
    found = regrade(replace(run, tasks="/nowhere"), attempt([HELLO, LEAVE]), task_set)
    assert found is not None
    assert "cannot be read any more" in found.problem


def test_tests_that_reach_no_verdict_now(source, make_task):
    run, _ = source
    folder = make_task("say-hello", {"tests/test.sh": "#!/bin/bash\ntrue\n"}).parent
    found = regrade(run, attempt([HELLO, LEAVE]), load_taskset(folder).content_hash)
    assert found is not None
    assert (found.is_equal, found.again) == (False, None)
    assert found.problem.startswith("VerifierError: say-hello: test.sh left neither")
