"""Every outcome of an episode, each injected; no sandbox is left open in any of them."""

import asyncio
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes import FileVerifier, MemorySandboxes

from burnish.envs.sandbox.base import SandboxError
from burnish.envs.task import Task, TaskConfig
from burnish.rollout.agents import ScriptedAgent
from burnish.rollout.config import EpisodeConfig
from burnish.rollout.episode import Services, run_episode
from burnish.rollout.harness.base import load_harness
from burnish.rollout.types import GenerationError, Slot, StopReason, Trajectory
from burnish.verifiers.types import Outcome, VerifierError

SOLVED = ["echo amber > out.txt", "exit"]


def task(**config) -> Task:
    return Task(
        id="write-amber",
        path=Path("write-amber"),
        instruction="Write amber to out.txt\n",
        config=TaskConfig(artifacts=("/app/out.txt",), **config),
        content_hash="0" * 64,
    )


UNGRADED = object()


def play(
    agent, *, sandboxes=None, verifier=None, harness=None, cancel_after_s=None, the_task=None, **budget
) -> Trajectory:
    sandboxes = sandboxes or MemorySandboxes()

    async def go() -> Trajectory:
        with ThreadPoolExecutor(4) as threads:
            services = Services(
                run_id="test",
                harness=harness or load_harness("bash"),
                sandboxes=sandboxes,
                verifier=None if verifier is UNGRADED else verifier or FileVerifier("/app/out.txt", "amber\n"),
                threads=threads,
            )
            slot = Slot(task_id="write-amber", group_index=0, member=0)
            episode = asyncio.create_task(
                run_episode(slot, slot.attempt_id(0), the_task or task(), agent, services, EpisodeConfig(**budget))
            )
            if cancel_after_s is not None:
                await asyncio.sleep(cancel_after_s)
                episode.cancel()
            return await episode

    trajectory = asyncio.run(go())
    assert not sandboxes.open, f"left open: {[s.id for s in sandboxes.open]}"
    return trajectory


def test_a_solved_task_is_finished_with_its_reward():
    trajectory = play(ScriptedAgent(SOLVED))
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.finished, StopReason.exit)
    assert trajectory.reward == 1.0
    assert [turn.action for turn in trajectory.turns] == SOLVED
    assert trajectory.turns[0].observation == "<output>\n</output>"
    assert Trajectory.from_dict(trajectory.to_dict()) == trajectory


def test_an_unsolved_task_is_finished_with_the_graders_zero():
    assert play(ScriptedAgent(["exit"])).reward == 0.0


def test_a_spent_budget_is_graded_as_it_stands():
    trajectory = play(ScriptedAgent([SOLVED[0], "cat out.txt", "cat out.txt"]), max_turns=2)
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.budget_exhausted, StopReason.max_turns)
    assert trajectory.reward == 1.0
    assert len(trajectory.turns) == 2


def test_the_wall_clock_ends_an_episode_between_turns():
    class Slow(ScriptedAgent):
        async def speak(self, deadline):
            await asyncio.sleep(0.06)
            return await super().speak(deadline)

    trajectory = play(Slow([SOLVED[0]] * 50), max_turns=50, wall_clock_s=0.2)
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.budget_exhausted, StopReason.wall_clock)
    assert 0 < len(trajectory.turns) < 6


def test_the_tasks_own_time_limit_wins_when_it_is_shorter():
    class Slow(ScriptedAgent):
        async def speak(self, deadline):
            assert deadline - time.monotonic() < 3.1
            return await super().speak(deadline)

    assert play(Slow(SOLVED), the_task=task(agent_timeout_s=3.0)).outcome is Outcome.finished


def test_a_sandbox_broken_by_the_agent_is_a_failure_with_a_consequence():
    trajectory = play(ScriptedAgent([SOLVED[0], "crash", "exit"]))
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.agent_crashed_env, StopReason.env_crash)
    assert trajectory.reward == 0.0, "solving it first does not help"
    ranged = play(ScriptedAgent(["crash"]), the_task=task(reward_range=(-1.0, 1.0)))
    assert ranged.reward == -1.0, "the lowest reward of the task"


@pytest.mark.parametrize(
    ("change", "outcome", "stop"),
    [
        ({"sandboxes": MemorySandboxes(fail_first=1)}, Outcome.infra_failed, StopReason.sandbox_error),
        ({"agent": ["unplug"]}, Outcome.infra_failed, StopReason.sandbox_error),
        ({"verifier": VerifierError("no test ran")}, Outcome.verifier_failed, StopReason.verifier_error),
        ({"verifier": SandboxError("engine gone")}, Outcome.infra_failed, StopReason.sandbox_error),
        ({"verifier": KeyError("reward")}, Outcome.verifier_failed, StopReason.verifier_error),
        ({"speaks": GenerationError("engine died")}, Outcome.infra_failed, StopReason.generation_error),
        ({"speaks": RuntimeError("unheard of")}, Outcome.infra_failed, StopReason.generation_error),
    ],
)
def test_what_is_not_the_agents_doing_carries_no_reward(change, outcome, stop):
    class Broken(ScriptedAgent):
        async def speak(self, deadline):
            raise change["speaks"]

    agent = Broken([]) if "speaks" in change else ScriptedAgent(change.get("agent", SOLVED))
    fault = change.get("verifier")
    trajectory = play(
        agent,
        sandboxes=change.get("sandboxes"),
        verifier=FileVerifier("/app/out.txt", "amber\n", fault) if fault else None,
    )
    assert (trajectory.outcome, trajectory.stop_reason) == (outcome, stop)
    assert not trajectory.has_reward
    assert trajectory.error
    with pytest.raises(ValueError, match="carries no reward"):
        _ = trajectory.reward


def test_a_harness_that_fails_is_infrastructure():
    class Broken:
        def opening(self, task):
            return []

        def parse(self, content):
            raise ZeroDivisionError("in the plug-in")

    trajectory = play(ScriptedAgent(SOLVED), harness=Broken())
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.infra_failed, StopReason.harness_error)
    assert "ZeroDivisionError: in the plug-in" in trajectory.error


@pytest.mark.parametrize("start_s", [0.0, 0.3])
def test_a_cancelled_episode_is_an_outcome_and_closes_its_sandbox(start_s):
    class Waiting(ScriptedAgent):
        async def speak(self, deadline):
            await asyncio.sleep(30)
            raise AssertionError

    started = time.monotonic()
    trajectory = play(Waiting([]), sandboxes=MemorySandboxes(start_s=start_s), cancel_after_s=0.1)
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.cancelled, StopReason.cancelled)
    assert time.monotonic() - started < 5


def test_the_container_starts_while_the_first_turn_is_sampled():
    class Slow(ScriptedAgent):
        async def speak(self, deadline):
            await asyncio.sleep(0.3)
            return await super().speak(deadline)

    trajectory = play(Slow(["exit"]), sandboxes=MemorySandboxes(start_s=0.3))
    assert trajectory.outcome is Outcome.finished
    assert trajectory.wall_s < 0.55, f"start and sampling one after the other took {trajectory.wall_s:.2f} s"


def test_a_timed_out_command_is_told_to_the_policy_and_the_episode_goes_on():
    trajectory = play(ScriptedAgent(["hang", "false", *SOLVED]))
    assert [turn.observation for turn in trajectory.turns[:2]] == [
        "<output timeout>\n</output>",
        "<output exit=1>\n</output>",
    ]
    assert trajectory.turns[0].timed_out
    assert trajectory.reward == 1.0


def test_the_same_failures_are_recorded_in_a_row_without_disturbing_siblings():
    sandboxes = MemorySandboxes(fail_first=1)
    assert play(ScriptedAgent(SOLVED), sandboxes=sandboxes).outcome is Outcome.infra_failed
    assert play(ScriptedAgent(SOLVED), sandboxes=sandboxes).reward == 1.0


def test_trajectories_are_values():
    trajectory = play(ScriptedAgent(SOLVED))
    with pytest.raises(dataclasses.FrozenInstanceError):
        trajectory.outcome = Outcome.cancelled


def test_a_run_that_grades_nothing_records_what_happened_and_no_reward():
    sandboxes = MemorySandboxes()
    finished = play(ScriptedAgent(SOLVED), sandboxes=sandboxes, verifier=UNGRADED)
    assert (finished.outcome, finished.verdict, finished.is_graded) == (Outcome.finished, None, False)
    assert finished.is_usable
    assert not finished.has_reward
    assert len(sandboxes.made) == 1, "the agent's sandbox only"
    assert Trajectory.from_dict(finished.to_dict()) == finished
    spent = play(ScriptedAgent(["false"] * 9), verifier=UNGRADED, max_turns=2)
    assert (spent.outcome, spent.is_usable) == (Outcome.budget_exhausted, True)
    crashed = play(ScriptedAgent(["crash"]), verifier=UNGRADED)
    assert (crashed.outcome, crashed.verdict, crashed.is_usable) == (Outcome.agent_crashed_env, None, True)
    unplugged = play(ScriptedAgent(["unplug"]), verifier=UNGRADED)
    assert (unplugged.outcome, unplugged.is_usable) == (Outcome.infra_failed, False)
