"""Reward functions in their processes: what they can do wrong is no verdict, and nothing of them is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from burnish.envs.errors import UserError
from burnish.envs.prompts.promptset import Prompt, completion_artifacts
from burnish.envs.sandbox.processes import MARK
from burnish.envs.task import TaskConfig
from burnish.verifiers.config import GradingConfig, Style
from burnish.verifiers.function import BUILT_IN, FunctionVerifier
from burnish.verifiers.types import VerifierError


def prompt(**changes) -> Prompt:
    fields = {"question": "2 + 2", "answer": "4", "place": "p.jsonl line 1", "config": TaskConfig()} | changes
    return Prompt(id="prompt-000001", path=Path("p.jsonl"), instruction="2 + 2", content_hash="0", **fields)


def graders() -> list[int]:
    """Processes of reward functions, and whatever they started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}=grader-".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture
def verifier():
    made = []

    def make(name, **settings):
        spec = name if name in BUILT_IN or ":" in name else f"reward_functions:{name}"
        made.append(FunctionVerifier(spec, GradingConfig(**{"processes": 1} | settings)))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert not graders()


def grade(verifier, completion, task=None):
    return verifier.verify(task or prompt(), completion_artifacts(completion), run_id="test", attempt_id="a-00")


def test_a_verdict_carries_rewards_log_and_what_was_graded(verifier):
    verdict = grade(verifier("plain"), "4")
    assert (verdict.reward, verdict.rewards) == (1.0, {"reward": 1.0, "length": 1.0})
    assert (verdict.tests_run, verdict.tests_passed) == (1, 1)
    assert verdict.artifacts_hash == completion_artifacts("4").content_hash
    wrong = grade(verifier("plain"), "5")
    assert (wrong.reward, wrong.tests_passed) == (0.0, 0)
    assert wrong.artifacts_hash != verdict.artifacts_hash


def test_what_a_function_prints_is_its_log_and_disturbs_nothing(verifier):
    one = verifier("printing")
    assert grade(one, "this").log == "looked at this\n"
    assert grade(one, "that").log == "looked at that\n"


def test_options_style_and_range(verifier):
    assert grade(verifier("number", options={"tolerance": 0.1}), "4.1").reward == 1.0
    assert grade(verifier("says_nothing", style=Style.plain), "x").reward == 1.0
    ranged = prompt(config=TaskConfig(reward_range=(-1.0, 5.0)))
    assert grade(verifier("plain", options={"bonus": 3.0}), "4", ranged).reward == 4.0
    with pytest.raises(VerifierError, match=r"gave 4, outside data.reward_range=\[0,1\]"):
        grade(verifier("plain", options={"bonus": 3.0}), "4")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raising", r"raised KeyError: 'x' \(.*reward_functions.py:\d+\); it printed: so far so good"),
        ("leaving", "raised SystemExit: 3"),
        ("dying", "ended by signal 9"),
        ("hanging", r"did not answer within grading.timeout_s = 1 s"),
        ("spinning", r"did not answer within grading.timeout_s = 1 s"),
        ("hoarding", "raised MemoryError"),
        ("returning", "raised NameError"),
    ],
)
def test_a_function_that_fails_gives_no_verdict_and_the_next_call_is_answered(verifier, name, says):
    one = verifier(name, timeout_s=1.0)
    started = time.monotonic()
    with pytest.raises(VerifierError, match=f"prompt-000001: reward_functions:{name} {says}"):
        grade(one, "x")
    assert time.monotonic() - started < 20
    if name in ("hanging", "returning"):
        assert grade(one, "quick" if name == "hanging" else "1.0").reward == 1.0
        assert "sleep" not in {Path(f"/proc/{pid}/comm").read_text().strip() for pid in graders()}


@pytest.mark.parametrize(
    "text", ["None", "'1'", "float('nan')", "np.nan", "float('inf')", "[1.0]", "{}", "Decimal(1)", "1e999"]
)
def test_what_is_no_number_is_no_verdict(verifier, text):
    one = verifier("returning")
    with pytest.raises(VerifierError, match="returned"):
        grade(one, text)
    assert grade(one, "Fraction(1, 2)").reward == 0.5


def test_public_case_f03_alarms_work_in_every_kind_of_thread(verifier):
    """A limit by alarm needs the main thread: under workers every score became 0, silently."""
    said, wanted = "\\boxed{\\frac{1}{3}}", prompt(answer="\\frac{1}{3}")
    maths, alarmed = verifier("math", processes=2), verifier("alarmed")
    assert grade(maths, said, wanted).reward == 1.0
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(grade, maths, said, wanted).result().reward == 1.0
        assert threads.submit(grade, alarmed, "4").result().reward == 1.0

    async def rollout():
        return await asyncio.gather(*(asyncio.to_thread(grade, maths, said, wanted) for _ in range(4)))

    assert [verdict.reward for verdict in asyncio.run(rollout())] == [1.0] * 4
    # an expression that would run for ever is a wrong answer where it is only compared
    assert grade(maths, "\\boxed{9^{9^{9^{9}}}}", wanted).reward == 0.0
    # and no verdict where a function runs it
    with pytest.raises(VerifierError, match=r"did not answer within grading\.timeout_s"):
        grade(verifier("returning", timeout_s=0.5), "9**9**9**9")


def test_calls_run_side_by_side_and_waiting_is_not_counted(verifier):
    one = verifier("returning", processes=2, timeout_s=5.0)
    with ThreadPoolExecutor(8) as threads:
        texts = [f"__import__('time').sleep(0.3) or {i} / 10" for i in range(8)]
        verdicts = list(threads.map(lambda text: grade(one, text), texts))
    assert [verdict.reward for verdict in verdicts] == [i / 10 for i in range(8)]


def test_a_process_is_kept_between_calls(verifier):
    one = verifier("counting")
    assert [grade(one, "x").reward for _ in range(3)] == [0.01, 0.02, 0.03]


def test_half_a_surrogate_and_a_long_completion_arrive(verifier):
    assert grade(verifier("plain"), "\ud800").rewards["length"] == 1.0
    assert grade(verifier("plain"), "x" * 500_000).rewards["length"] == 500_000.0


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("exat", r"neither a built-in \(exact, number, math, reasoning_gym\) nor an import path"),
        ("reward_functions:", "neither a built-in"),
        ("no_such_module:f", "no module named 'no_such_module' in this folder or on PYTHONPATH"),
        ("reward_functions:plan", "module 'reward_functions' has no 'plan'"),
        ("reward_functions:Scorer", "Scorer is a class, not a function"),
        ("reward_functions:wants_more", "wants_more wants the argument difficulty"),
        ("broken_rewards:f", r"'broken_rewards' cannot be imported: ZeroDivisionError: division by zero \(.*:2\)"),
        ("lacking_rewards:f", "'lacking_rewards' cannot be imported: no module named 'no_such_library'"),
    ],
)
def test_what_does_not_resolve_is_named(tmp_path, monkeypatch, spec, says):
    (tmp_path / "broken_rewards.py").write_text("def f(completion): ...\n1 / 0\n")
    (tmp_path / "lacking_rewards.py").write_text("import no_such_library\n")
    # the folder that the command is given in
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says):
        FunctionVerifier(spec, GradingConfig())
    assert not graders()


def test_a_function_of_the_current_folder_is_found_and_shadows_nothing(tmp_path, monkeypatch):
    (tmp_path / "rewards.py").write_text("import random\ndef f(completion): return float(hasattr(random, 'Random'))\n")
    (tmp_path / "random.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    verifier = FunctionVerifier("rewards:f", GradingConfig())
    assert grade(verifier, "x").reward == 1.0
    verifier.close()


def test_what_a_function_lacks_of_a_prompt_is_named(verifier):
    verifier("plain").check([prompt()])
    with pytest.raises(
        UserError, match=r"p.jsonl line 1: verifier 'exact' compares with an answer.*data.columns.answer="
    ):
        verifier("exact").check([prompt(answer=None)])
    verifier("by_length").check([prompt(answer=None)])
    verifier("solution_reward").check([prompt(columns={"solution": "4"})])
    with pytest.raises(UserError, match=r"p\.jsonl line 1: column solution is missing; verifier"):
        verifier("solution_reward").check([prompt()])


@pytest.mark.parametrize("changes", [{"timeout_s": 0}, {"timeout_s": 601}, {"processes": 0}, {"memory_mb": 1}])
def test_settings_out_of_range_are_named(changes):
    with pytest.raises(UserError, match=f"grading.{next(iter(changes))} must be"):
        GradingConfig(**changes)


def test_a_closed_verifier_ends_what_was_being_asked(verifier):
    one = verifier("hanging", timeout_s=1.0)

    def ask():
        with pytest.raises(VerifierError):
            grade(one, "x")

    waiting = threading.Thread(target=ask)
    waiting.start()
    time.sleep(0.2)
    one.close()
    waiting.join(timeout=20)
    assert not waiting.is_alive()


@pytest.mark.parametrize("name", ["hanging", "by_length"])
def test_a_parent_that_is_killed_leaves_no_process(tmp_path, name):
    program = f"""
from test_function import grade, GradingConfig, FunctionVerifier
verifier = FunctionVerifier("reward_functions:{name}", GradingConfig(timeout_s=600))
print("up", flush=True)
grade(verifier, "x")
import time; time.sleep(600)
"""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env, cwd=tmp_path)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    time.sleep(0.3)
    assert graders()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while (left := [pid for pid in graders() if b"function_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not left
    for pid in graders():  # what the function itself had started: nobody is there to end it
        os.kill(pid, signal.SIGKILL)
