"""Prompts instead of machines: episodes without a sandbox, rewards by functions, evaluation, and what a user gets wrong."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from burnish.configs.cli import main as burnish
from burnish.envs.config import SandboxKind
from burnish.envs.errors import UserError
from burnish.envs.prompts.config import PromptColumns, PromptData, PromptFormat
from burnish.envs.prompts.promptset import load_prompts
from burnish.policy.config import InitRun
from burnish.policy.initialize import main as initialise
from burnish.rollout.agents import ScriptedAgent
from burnish.rollout.config import Agent, EpisodeConfig, EvalRun, RlRun
from burnish.rollout.episode import Services, Speech, run_episode
from burnish.rollout.evaluate import CONDITIONS, RESULTS, SUMMARY, main
from burnish.rollout.harness.base import Run, load_harness
from burnish.rollout.sources import open_harness, open_machines
from burnish.rollout.stats import read_results
from burnish.rollout.train import check as check_rl
from burnish.rollout.types import Slot, StopReason, Trajectory
from burnish.verifiers.config import GradingConfig
from burnish.verifiers.function import FunctionVerifier
from burnish.verifiers.types import Outcome


@pytest.fixture(autouse=True)
def no_machines(monkeypatch):
    """Whoever asks for a sandbox of any kind is told, and so is who asks for an engine."""

    def refuse(*args, **kwargs):
        raise AssertionError("a sandbox was asked for")

    for place in ("burnish.envs.sandbox.base.open_sandboxes", "burnish.rollout.sources.open_sandboxes"):
        monkeypatch.setattr(place, refuse)
    for kind in ("local.LocalSandboxes", "docker.DockerSandboxes"):
        monkeypatch.setattr(f"burnish.envs.sandbox.{kind}.__init__", refuse)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.jsonl"
    records = [{"prompt": f"{i} + {i}", "answer": str(2 * i), "data_source": "sums"} for i in range(6)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def play(prompts: str, agent, verifier="exact", harness="answer", grading=None, **budget) -> Trajectory:
    task = load_prompts(PromptData(path=prompts)).tasks[1]
    grader = FunctionVerifier(verifier, grading or GradingConfig(processes=1))

    async def go():
        with ThreadPoolExecutor(4) as threads:
            services = Services(
                run_id="test",
                harness=load_harness(harness) if isinstance(harness, str) else harness,
                sandboxes=None,
                verifier=grader,
                threads=threads,
            )
            slot = Slot(task_id=task.id, group_index=0, member=0)
            return await run_episode(slot, slot.attempt_id(0), task, agent, services, EpisodeConfig(**budget))

    try:
        return asyncio.run(go())
    finally:
        grader.close()


def test_one_turn_is_the_episode_and_what_was_said_is_graded(prompts):
    right = play(prompts, ScriptedAgent(["2"]))
    assert (right.outcome, right.stop_reason, right.reward) == (Outcome.finished, StopReason.exit, 1.0)
    assert [turn.action for turn in right.turns] == ["2"]
    assert "sandbox_start_s" not in right.extras
    assert play(prompts, ScriptedAgent(["3"])).reward == 0.0
    assert play(prompts, ScriptedAgent(["exit"])).reward == 0.0, "no word has a meaning of its own"
    assert play(prompts, ScriptedAgent([""])).reward == 0.0
    assert Trajectory.from_dict(right.to_dict()) == right


def test_an_answer_that_was_cut_off_is_graded_as_it_stands(prompts):
    class Cut(ScriptedAgent):
        async def speak(self, deadline):
            return Speech(content="2", finish_reason="max_tokens", num_sampled_tokens=1)

    trajectory = play(prompts, Cut([]))
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.budget_exhausted, StopReason.max_tokens)
    assert trajectory.reward == 1.0


@pytest.mark.parametrize("name", ["raising", "hanging", "returning", "dying"])
def test_a_function_without_a_reward_is_verifier_failed_and_never_zero(prompts, name):
    """F03 of the public cases, its rollout: the sample carries no reward, and the reason is told."""
    grading = GradingConfig(processes=1, timeout_s=1.0)
    trajectory = play(prompts, ScriptedAgent(["float('nan')"]), f"reward_functions:{name}", grading=grading)
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.verifier_failed, StopReason.verifier_error)
    assert not trajectory.has_reward
    assert f"reward_functions:{name}" in trajectory.error
    with pytest.raises(ValueError, match="carries no reward"):
        _ = trajectory.reward


def test_a_harness_that_runs_commands_after_all_is_told(prompts):
    class Wrong(type(load_harness("answer"))):
        def parse(self, content):
            return Run(command=content)

    trajectory = play(prompts, ScriptedAgent(["ls"]), harness=Wrong())
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.infra_failed, StopReason.harness_error)
    assert "says needs_sandbox = False" in trajectory.error


def evaluation(prompts: str, out: Path, **changes) -> EvalRun:
    fields = {"data": PromptData(path=prompts), "verifier": "exact", "agent": Agent.oracle, "out": str(out)}
    return EvalRun(**fields | changes)


def test_eval_needs_no_machine(prompts, tmp_path):
    """The oracle says the answers, nothing says nothing; sandbox=docker without an engine is no hindrance."""
    assert main(evaluation(prompts, tmp_path / "oracle", sandbox=SandboxKind.docker)) == 0
    summary = json.loads((tmp_path / "oracle" / SUMMARY).read_text())
    assert (summary["all"]["pass"], summary["all"]["n"], summary["harness"]) == (1.0, 6, "answer")
    assert summary["families"]["sums"]["pass"] == 1.0
    assert summary["tasks"] == prompts
    conditions = json.loads((tmp_path / "oracle" / CONDITIONS).read_text())
    assert (conditions["sandbox"], conditions["verifier"]) == ("none", "exact")
    assert conditions["task_set"] == load_prompts(PromptData(path=prompts)).content_hash
    assert main(evaluation(prompts, tmp_path / "nop", agent=Agent.nop)) == 0
    assert json.loads((tmp_path / "nop" / SUMMARY).read_text())["all"]["pass"] == 0.0


def test_an_evaluation_with_other_grading_is_another_evaluation(prompts, tmp_path):
    assert main(evaluation(prompts, tmp_path / "out", verifier="number")) == 0
    assert main(evaluation(prompts, tmp_path / "out", verifier="number")) == 0
    with pytest.raises(UserError, match="holds an evaluation with grading="):
        main(
            evaluation(prompts, tmp_path / "out", verifier="number", grading=GradingConfig(options={"tolerance": 0.1}))
        )


def test_what_cannot_be_graded_is_ungraded_and_not_failed(prompts, tmp_path):
    run = evaluation(prompts, tmp_path / "out", verifier="reward_functions:raising", limit=2, max_attempts=2)
    assert main(run) == 1, "nothing could be graded"
    summary = json.loads((tmp_path / "out" / SUMMARY).read_text())
    assert (summary["graded"], summary["ungraded"], summary["mean_reward"]) == (0, 2, None)
    rows = read_results(tmp_path / "out" / RESULTS)
    assert {(row["outcome"], row["reward"], row["passed"], row["attempts"]) for row in rows} == {
        ("verifier_failed", None, None, 2)
    }


def test_verl_and_trl_data_are_evaluated_with_their_functions(tmp_path):
    verl = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "2 + 2"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0},
    }
    (tmp_path / "verl.jsonl").write_text(json.dumps(verl) + "\n")
    data = PromptData(path=str(tmp_path / "verl.jsonl"), format=PromptFormat.verl)
    assert main(evaluation("", tmp_path / "v", data=data, verifier="reward_functions:compute_score")) == 0
    assert json.loads((tmp_path / "v" / SUMMARY).read_text())["all"]["pass"] == 1.0
    (tmp_path / "trl.jsonl").write_text(json.dumps({"prompt": verl["prompt"], "solution": "4"}) + "\n")
    columns = PromptColumns(answer="solution")
    data = PromptData(path=str(tmp_path / "trl.jsonl"), format=PromptFormat.trl, columns=columns)
    assert main(evaluation("", tmp_path / "t", data=data, verifier="reward_functions:solution_reward")) == 0
    assert json.loads((tmp_path / "t" / SUMMARY).read_text())["all"]["pass"] == 1.0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["eval", "agent=nop"], "tasks must not be empty: give tasks=DIR (task folders) or data.path=FILE (prompts)"),
        (["eval", "agent=nop", "data.path={file}"], "data.path needs verifier=NAME (exact, number, math, reasoning_gym)"),
        (["eval", "agent=nop", "data.path={file}", "tasks=x", "verifier=exact"], "give task folders or prompts, not both"),
        (["eval", "agent=nop", "data.path={file}", "verifier=exat"], "verifier 'exat' is neither a built-in"),
        (["eval", "agent=nop", "data.path={file}", "verifier=exact", "harness=bash"], "harness=bash acts in a sandbox"),
        (["eval", "agent=nop", "data.path={file}x", "verifier=exact"], "no such prompt file"),
        (["eval", "agent=nop", "data.path={file}", "verifier=exact", "data.format=trl"], "give data.columns.answer="),
        (["eval", "agent=nop", "data.path={file}", "verifier=exact", "data.format=very"], "data.format: expected plain|verl|trl"),
        (["eval", "agent=nop", "data.path={file}", "verifier=exact", "data.columns.answer=gold"], "line 1: column gold is missing"),
        (["eval", "agent=nop", "data.path={file}", "verifier=exact", "split=heldout"], "no split 'heldout'; it has train"),
        (["eval", "agent=oracle", "data.path={file}", "verifier=reward_functions:by_length", "data.columns.answer=null"],
         "line 1: no answer that the oracle could say"),
        (["rl", "policy=p"], "tasks is not set: burnish rl needs tasks=DIR or data.path=FILE, and policy=DIR"),
        (["rl", "policy=p", "data.path={file}"], "data.path needs verifier=NAME"),
        (["rl", "data.path={file}", "verifier=exact"], "policy is not set"),
        (["rl", "policy=p", "data.path={file}", "verifier=exact", "data.colums.answer=x"], "unknown key 'data.colums.answer'"),
        (["rl", "policy=p", "data.path={file}", "verifier=exact", "grading.timeout_s=0"], "grading.timeout_s must be"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_exit_code_2(prompts, words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert burnish([word.format(file=prompts) for word in words]) == 2
    complaint = capsys.readouterr().err.strip().splitlines()[-1]
    assert complaint.startswith(f"burnish {words[0]}: ")
    assert says in complaint
    assert not (tmp_path / "runs").exists()


def test_a_task_folder_is_not_asked_as_a_prompt(make_task):
    folder = make_task().parent
    run = EvalRun(tasks=str(folder), harness="answer", agent=Agent.nop)
    with pytest.raises(UserError, match="harness=answer never acts in a sandbox, so hidden tests would see nothing"):
        open_harness(run)


def test_harness_and_verifier_are_filled_in():
    tasks, data = RlRun(tasks="t"), RlRun(data=PromptData(path="p.jsonl"), verifier="math")
    assert (tasks.harness, tasks.verifier) == ("bash", "hidden_tests")
    assert (data.harness, data.verifier) == ("answer", "math")
    assert (tasks.episode.max_turns, data.episode.max_turns) == (8, 1)
    assert open_machines(data) is None


def test_a_prompt_that_leaves_no_room_for_an_answer_is_named(tmp_path):
    initialise(InitRun(out=str(tmp_path / "policy")))
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": "word " * n, "answer": "a"}) + "\n" for n in (1, 300)))
    for run, check in (
        (evaluation(str(path), tmp_path / "out", agent=Agent.policy, policy=str(tmp_path / "policy")), main),
        (RlRun(data=PromptData(path=str(path)), verifier="exact", policy=str(tmp_path / "policy")), check_rl),
    ):
        run.episode.max_context_tokens = 128
        with pytest.raises(
            UserError, match=r"p.jsonl line 2: its prompt has \d+ tokens, episode.max_context_tokens is 128"
        ):
            check(run)
