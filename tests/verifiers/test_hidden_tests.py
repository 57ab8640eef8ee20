"""Grading: exact rewards for honest work, and for every exploit a 0 or no verdict, never a 1."""

import json
import threading
import time

import pytest

from burnish.envs.sandbox.base import ArtifactFile, Artifacts, OneShot
from burnish.envs.task import load_task
from burnish.verifiers.hidden_tests import HiddenTests, read_result
from burnish.verifiers.types import Verdict, VerifierError

RUN = "test-verify"
ONE_PASSED = '{"results": {"tests": [{"name": "a", "status": "passed"}]}}'
# careless on purpose: runs where the agent's files lie, and imports by name
CARELESS = """#!/usr/bin/env bash
cd /app
python3 -m json.tool answer.json >/dev/null && PYTHONPATH=/tests python3 -m check
code=$?
echo "{\\"results\\": {\\"summary\\": {\\"passed\\": $((code == 0)), \\"failed\\": $((code != 0))}}}" > /logs/verifier/ctrf.json
echo $((code == 0)) > /logs/verifier/reward.txt
"""
CHECK = "import json, sys\nsys.exit(json.load(open('answer.json')) != {'answer': 42})\n"


def graded(sandboxes, task, *commands: str, limit_s: float = 20.0) -> Verdict:
    """An episode by hand: commands in the agent's sandbox, its artifacts, its end, the verdict."""
    sandbox = sandboxes.create(task, role="agent", run_id=RUN, attempt_id="a1")
    try:
        for command in commands:
            sandbox.run(command, limit_s)
        artifacts = sandbox.get_artifacts(task.config.artifacts)
    finally:
        sandbox.close()
    return HiddenTests(sandboxes).verify(task, artifacts, run_id=RUN, attempt_id="a1")


def test_the_oracle_gets_one_and_no_op_gets_zero(sandboxes, make_task):
    task = load_task(make_task())
    verdict = graded(sandboxes, task, *task.solution_lines())
    assert (verdict.reward, verdict.tests_run, verdict.tests_passed) == (1.0, 1, 1)
    nothing = graded(sandboxes, task)
    assert (nothing.reward, nothing.tests_run, nothing.tests_passed) == (0.0, 1, 0)
    assert "No such file" in nothing.log
    assert verdict.artifacts_hash != nothing.artifacts_hash


def test_deleted_files_stay_deleted_and_modes_and_folders_cross(sandboxes, make_task):
    test = """#!/bin/sh
ok=0
[ ! -e /app/note.txt ] && [ -x /app/run.sh ] && [ -d /app/made/empty ] && [ -f /tests/sub/extra.txt ] && ok=1
echo '{"results": {"summary": {"passed": 1}}}' > /logs/verifier/ctrf.json
echo $ok > /logs/verifier/reward.txt
"""
    task = load_task(make_task(files={"tests/test.sh": test, "tests/sub/extra.txt": "x"}))
    verdict = graded(sandboxes, task, "rm note.txt; echo echo > run.sh; chmod +x run.sh; mkdir -p made/empty")
    assert verdict.reward == 1.0


WRITE = f"echo '{ONE_PASSED}' > /logs/verifier/ctrf.json; echo 0.25 > /logs/verifier/reward.txt\n"
WRITE_PY = f"""
open("/logs/verifier/ctrf.json", "w").write('{ONE_PASSED}')
open("/logs/verifier/reward.txt", "w").write("0.25")
"""


@pytest.mark.parametrize("text", [f"#!/bin/sh -e\n{WRITE}", f"#!/usr/bin/env python3\n{WRITE_PY}", WRITE])
def test_the_tests_own_interpreter_is_used(sandboxes, make_task, text):
    assert graded(sandboxes, load_task(make_task(files={"tests/test.sh": text}))).reward == 0.25


def test_work_that_is_done_counts_although_the_agent_ran_over_a_time_limit(sandboxes, make_task):
    # C-29
    task = load_task(make_task())
    assert graded(sandboxes, task, "echo hello > out.txt; sleep 60", limit_s=0.5).reward == 1.0


EXPLOITS = {
    "rewards written in advance": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "a loop that writes rewards": "(while :; do echo 1 > /logs/verifier/reward.txt; done) & sleep 0.1",
    "planted conftest and settings": "printf 'import os; os._exit(0)' | tee conftest.py sitecustomize.py usercustomize.py; printf '[pytest]\\naddopts = --collect-only' > pytest.ini",
    "modules of the tests' names": "printf 'import os; os._exit(0)' | tee json.py check.py sys.py runpy.py json/__init__.py 2>/dev/null; mkdir json; echo 'import os; os._exit(0)' | tee json/__init__.py json/tool.py",
    "programs of the tools' names": "printf '#!/bin/sh\\nexit 0' | tee python3 cat bash pytest; chmod +x python3 cat bash pytest",
    "a FIFO as the answer": "mkfifo answer.json out.txt",
    "a folder as the answer": "mkdir answer.json out.txt",
    "a link to the tests": "ln -s /tests/answer.json answer.json; ln -s /tests/expected out.txt",
    "a link to the reward": "ln -s /logs/verifier/reward.txt answer.json; ln -s /logs/verifier out.txt",
    "the whole folder a link": "cd /; rm -rf /app; ln -s /tests /app",
    "names that look like options": "touch -- -rf '--help' '$(touch pwned)' '; exit 0'",
}  # fmt: skip


@pytest.mark.parametrize("name", EXPLOITS)
def test_no_exploit_in_the_agents_sandbox_earns_anything(sandboxes, make_task, name):
    careless = load_task(make_task(files={"tests/test.sh": CARELESS, "tests/check.py": CHECK}))
    try:
        verdict = graded(sandboxes, careless, EXPLOITS[name])
    except VerifierError:
        return
    assert (verdict.reward, verdict.tests_passed) == (0.0, 0)


def test_the_careless_tests_do_pass_honest_work(sandboxes, make_task):
    task = load_task(make_task(files={"tests/test.sh": CARELESS, "tests/check.py": CHECK}))
    assert graded(sandboxes, task, "echo '{\"answer\": 42}' > answer.json").reward == 1.0


@pytest.mark.docker
@pytest.mark.parametrize("sandboxes", ["docker"], indirect=True)
@pytest.mark.parametrize(
    "command",
    [
        "printf '#!/bin/sh\\nexit 0' > /bin/b; chmod +x /bin/b; cp /bin/b /usr/bin/python3; mv /bin/b /bin/bash",
        "echo 'import os; os._exit(0)' > /usr/lib/python3/dist-packages/x.pth; echo /app/x.so > /etc/ld.so.preload",
        "mkdir -p /tests; printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod +x /tests/test.sh",
        "pkill -9 burnish-wait",
    ],
)
def test_nothing_outside_the_declared_artifacts_crosses(sandboxes, make_task, command):
    task = load_task(make_task())
    sandbox = sandboxes.create(task, role="agent", run_id=RUN, attempt_id="a1")
    try:
        try:
            sandbox.run(command, 20)
        except RuntimeError:
            assert "burnish-wait" in command
        artifacts = sandbox.get_artifacts(task.config.artifacts)
    finally:
        sandbox.close()
    assert HiddenTests(sandboxes).verify(task, artifacts, run_id=RUN, attempt_id="a1").reward == 0.0


@pytest.mark.docker
@pytest.mark.parametrize("sandboxes", ["docker"], indirect=True)
def test_the_verifiers_container_is_labelled_and_leaves_nothing(sandboxes, make_task):
    test = (
        f"#!/bin/bash\nsleep 1.5\necho '{ONE_PASSED}' > /logs/verifier/ctrf.json\necho 1 > /logs/verifier/reward.txt\n"
    )
    task = load_task(make_task(files={"tests/test.sh": test}))
    seen: list[dict] = []
    done = threading.Event()

    def look() -> None:
        while not seen and not done.wait(0.05):
            seen.extend(sandboxes.client.containers(filters={"label": "burnish.run=test-verify-label"}))

    def grade() -> None:
        # a worker thread, as rollouts use: nothing in grading needs the main thread (F03)
        assert (
            HiddenTests(sandboxes).verify(task, Artifacts(), run_id="test-verify-label", attempt_id="a7").reward == 1.0
        )
        done.set()

    threads = [threading.Thread(target=look), threading.Thread(target=grade)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done.is_set()
    assert [(found["Labels"]["burnish.role"], found["Labels"]["burnish.attempt"]) for found in seen] == [
        ("verifier", "a7")
    ]
    assert not sandboxes.client.containers(all=True, filters={"label": "burnish.run=test-verify-label"})


BROKEN_TESTS = {
    # C-05: the bootstrap of the tests fails, and a 0 is written all the same
    "no proof": ("curl http://unreachable.invalid/x | sh; echo 0 > /logs/verifier/reward.txt", "nothing proves that a test ran"),
    "no reward": ("exit 0", "left neither reward.json nor reward.txt"),
    "wrong name": ("echo '{\"reward\": 1}' > /logs/verifier/rewards.json", "the file's name is reward.json"),
    "killed": ("kill -9 $$", "left neither"),
    "FIFO": ("mkfifo /logs/verifier/reward.txt", "not a regular file|FIFO"),
    "folder": ("mkdir /logs/verifier/reward.txt", "is a directory"),
    "link": ("ln -s /etc/hostname /logs/verifier/reward.txt", "symbolic link"),
    # C-30, C-31: a reward that was written before the limit is not believed, and the tree is gone in time
    "too long": ("echo 1 > /logs/verifier/reward.txt; setsid sleep 600 & trap '' TERM; sleep 600", "did not end within"),
    "huge": ("head -c 200000 /dev/zero | tr '\\0' 1 > /logs/verifier/reward.txt", "more than 65536"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_TESTS)
def test_broken_tests_are_no_verdict_and_never_a_zero(sandboxes, make_task, name):
    script, expected = BROKEN_TESTS[name]
    files = {"tests/test.sh": f"#!/bin/bash\necho began\n{script}\n"}
    if name == "too long":
        files["task.toml"] = '[verifier]\nenvironment_mode = "separate"\ntimeout_sec = 1.0\n'
    task = load_task(make_task(files=files))
    started = time.monotonic()
    with pytest.raises(VerifierError, match=expected) as caught:
        HiddenTests(sandboxes).verify(task, Artifacts(), run_id=RUN, attempt_id="a1")
    assert time.monotonic() - started < 15
    assert "say-hello: " in str(caught.value)
    assert "began" in str(caught.value)


def result(tmp_task, **files: str | bytes) -> tuple[dict[str, float], int, int]:
    made = tuple(
        ArtifactFile(
            path=f"/logs/verifier/{name.replace('_', '.')}", content=text if isinstance(text, bytes) else text.encode()
        )
        for name, text in files.items()
    )
    done = OneShot(exit_code=0, timed_out=False, duration_s=0.1, artifacts=Artifacts(files=made))
    rewards, report = read_result(tmp_task, done)
    return rewards, report.tests_run, report.tests_passed


@pytest.fixture
def task(make_task):
    return load_task(make_task())


def test_reward_json_wins_over_reward_txt(task):
    # C-08
    assert result(task, reward_json='{"reward": 0.3, "f2p": 2}', reward_txt="1", ctrf_json=ONE_PASSED)[0] == {
        "reward": 0.3,
        "f2p": 2.0,
    }
    with pytest.raises(VerifierError, match=r"reward\.json is not JSON"):
        result(task, reward_json="{", reward_txt="1", ctrf_json=ONE_PASSED)


@pytest.mark.parametrize(("text", "reward"), [("1", 1.0), ("0.5\n", 0.5), (" .25 ", 0.25), ("1e-1", 0.1), ("-0", 0.0)])
def test_reward_text_that_is_a_number_counts(task, text, reward):
    assert result(task, reward_txt=text, ctrf_json=ONE_PASSED)[0] == {"reward": reward}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nan",
        "inf",
        "1_0",
        "\uff11",
        "\u0661",
        "\ufeff1",
        "1 1",
        "true",
        "1e999",
        "0x1",
        b"\xff",
        "1000",
        "-5",
        "1.0000001",
    ],
)
def test_reward_text_that_is_none_or_out_of_range_is_no_verdict(task, text):
    with pytest.raises(VerifierError, match=r"holds no number|outside \[0, 1\]"):
        result(task, reward_txt=text, ctrf_json=ONE_PASSED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # C-41: says which key
        ('{"score": 1.0, "status": "pass", "failures": []}', "'status' is not a finite number: 'pass'"),
        ('{"reward": [1]}', "'reward' is not a finite number"),
        ('{"reward": NaN}', "NaN is not a number"),
        ('{"reward": 1e999}', "'reward' is not a finite number"),
        ('{"reward": null}', "'reward' is not a finite number"),
        ('{"reward": 0, "reward": 1}', "a key is given twice"),
        ("{}", "must hold an object of numbers"),
        ("1", "must hold an object of numbers"),
        ('{"a": 1, "b": 0}', "has no key `reward`, only a, b"),
        ('{"reward": 2}', r"outside \[0, 1\]"),
        ("[" * 100_000, "more than 65536"),
        ("[" * 60_000, "not JSON"),
        ('{"reward": ' + "9" * 400 + "}", "'reward' is not a finite number"),
    ],
)
def test_reward_json_that_is_wrong_names_the_key(task, text, expected):
    with pytest.raises(VerifierError, match=expected):
        result(task, reward_json=text, ctrf_json=ONE_PASSED)


def test_one_key_of_any_name_and_booleans_are_read_as_harbor_does(task):
    assert result(task, reward_json='{"score": 0.5}', ctrf_json=ONE_PASSED)[0]["reward"] == 0.5
    assert result(task, reward_json='{"reward": true}', ctrf_json=ONE_PASSED)[0]["reward"] == 1.0


def test_a_declared_range_replaces_zero_to_one(make_task):
    toml = '[metadata]\nreward_range = [-2, 3]\n[verifier]\nenvironment_mode = "separate"\n'
    task = load_task(make_task(files={"task.toml": toml}))
    assert result(task, reward_txt="-2", ctrf_json=ONE_PASSED)[0]["reward"] == -2.0
    with pytest.raises(VerifierError, match=r"outside \[-2, 3\]"):
        result(task, reward_txt="3.1", ctrf_json=ONE_PASSED)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ("", "not JSON"),
        ("[]", "has no `results`"),
        ('{"results": {}}', "neither `tests` nor `summary`"),
        ('{"results": {"tests": []}}', "shows no test that ran"),
        # a conftest that skips everything is no proof
        (json.dumps({"results": {"tests": [{"status": "skipped"}] * 8}}), "shows no test that ran"),
        ('{"results": {"summary": {"passed": 0, "failed": 0, "skipped": 8}}}', "shows no test that ran"),
        ('{"results": {"summary": {"passed": "many"}}}', "is no count"),
        ('{"results": {"summary": {"passed": -1}}}', "is no count"),
        (json.dumps({"results": {"tests": [{"status": "failed"}]}}), "none of 1 tests passed"),
    ],
)
def test_without_proof_that_a_test_ran_there_is_no_verdict(task, report, expected):
    with pytest.raises(VerifierError, match=expected):
        result(task, reward_txt="1", ctrf_json=report)


def test_tests_are_counted(task):
    states = ["passed"] * 3 + ["failed"] * 2 + ["skipped", "pending", "other"]
    report = json.dumps({"results": {"tests": [{"name": str(n), "status": state} for n, state in enumerate(states)]}})
    assert result(task, reward_txt="0.6", ctrf_json=report)[1:] == (6, 3)
    big = json.dumps({"results": {"tests": [{"name": str(n), "status": "passed"} for n in range(100_000)]}})
    assert result(task, reward_txt="1", ctrf_json=big)[1:] == (100_000, 100_000)
