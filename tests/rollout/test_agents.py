"""Token exactness: what the engine sampled is what the next turn continues and what the blocks hold, id for id."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from fakes import FileVerifier, MemorySandboxes, ScriptedEngine

from burnish.envs.task import Task, TaskConfig
from burnish.policy.encoding.config import EncodingConfig
from burnish.policy.encoding.conversation import Conversation
from burnish.policy.encoding.messages import Message, Role
from burnish.policy.encoding.subvocabulary import tiny_tokenizer
from burnish.rollout.agents import PolicyAgent, oracle, sampling_seed, solution_commands
from burnish.rollout.blocks import read_block
from burnish.rollout.config import EpisodeConfig, SamplingConfig
from burnish.rollout.episode import Services, run_episode
from burnish.rollout.generator import EngineLoop
from burnish.rollout.harness.base import load_harness
from burnish.rollout.token_log import TokenLog
from burnish.rollout.types import Slot, StopReason, Trajectory
from burnish.verifiers.types import Outcome

TASK = Task(
    id="t",
    path=Path("t"),
    instruction="write amber to out.txt",
    config=TaskConfig(artifacts=("/app/out.txt",)),
    content_hash="",
)


@cache
def tokenizer():
    return tiny_tokenizer()


def say(text: str) -> list[int]:
    return [*tokenizer().encode(text), tokenizer().special.eos]


def play(engine, directory, *, encoding=None, sampling=None, at_start=None, **budget) -> tuple[Trajectory, list]:
    """One episode of the policy; returns the trajectory and its blocks."""

    async def go() -> Trajectory:
        loop = EngineLoop(engine, "generator-0")
        slot = Slot(task_id="t", group_index=0, member=0)
        settings = EpisodeConfig(**budget)
        agent = PolicyAgent(
            attempt_id=slot.attempt_id(0),
            conversation=Conversation(tokenizer(), encoding or EncodingConfig()),
            engine=loop,
            log=TokenLog(directory, slot.attempt_id(0)),
            sampling=sampling or SamplingConfig(),
            budget=settings,
            seed=sampling_seed(0, slot.slot_id),
            eos=tokenizer().special.eos,
        )
        with ThreadPoolExecutor(2) as threads:
            services = Services(
                run_id="test",
                harness=load_harness("bash"),
                sandboxes=MemorySandboxes(),
                verifier=FileVerifier("/app/out.txt", "amber\n"),
                threads=threads,
            )
            helper = asyncio.create_task(at_start(loop)) if at_start else None
            trajectory = await run_episode(slot, slot.attempt_id(0), TASK, agent, services, settings)
            if helper is not None:
                await helper
        loop.close()
        return trajectory

    trajectory = asyncio.run(go())
    return trajectory, [read_block(directory, ref) for ref in trajectory.blocks]


def turns(*replies: list[int]):
    """An engine whose n-th request gets the n-th reply."""
    return ScriptedEngine(lambda ids, sampling, version: _next(ids, replies))


def _next(ids, replies):
    # which turn it is shows in the number of assistant headers
    header = tokenizer().special.assistant
    return replies[ids.count(header) - 1]


def odd_spelling() -> list[int]:
    """Ids of `echo amber > out.txt` that no encoder would make: one token replaced by its bytes' tokens."""
    ids = tokenizer().encode("echo amber > out.txt")
    for place, token in enumerate(ids):
        pieces = [i for byte in tokenizer().token_bytes(token).decode() for i in tokenizer().encode(byte)]
        odd = [*ids[:place], *pieces, *ids[place + 1 :]]
        if odd != ids and tokenizer().decode(odd) == tokenizer().decode(ids):
            return odd
    raise AssertionError("the vocabulary has no token of several characters")


def test_sampled_ids_are_never_encoded_again(tmp_path):
    # public case B08: byte-pair encoding is not one-to-one
    sampled = [*odd_spelling(), tokenizer().special.eos]
    assert tokenizer().encode(tokenizer().decode(sampled[:-1])) != sampled[:-1]
    engine = turns(sampled, say("cat out.txt"), say("exit"))
    trajectory, blocks = play(engine, tmp_path)
    assert trajectory.outcome is Outcome.finished
    assert trajectory.reward == 1.0
    first, second, third = (ids for _, ids, _ in engine.requests)
    assert second[: len(first) + len(sampled)] == first + sampled, "turn 2 starts with what was received at turn 1"
    assert third[: len(second)] == second
    ids = np.concatenate([block.ids_T for block in blocks]).tolist()
    mask = np.concatenate([block.sampled_T for block in blocks])
    assert ids == third + say("exit")
    assert [i for i, m in zip(ids, mask, strict=True) if m] == [*sampled, *say("cat out.txt"), *say("exit")]
    lp = np.concatenate([block.lp_behaviour_T for block in blocks])
    assert np.isnan(lp[~mask]).all(), "0.0 would mean probability 1"
    assert np.allclose(lp[mask], [-0.1 - (i % 7) / 10 for i in np.array(ids)[mask]])


def test_turn_by_turn_ids_equal_those_of_the_whole_conversation(tmp_path):
    # public case 55: canonical replies, so the encoder must give the very same ids for the conversation as a whole
    engine = turns(say("echo amber > out.txt"), say("false"), say("exit"))
    trajectory, blocks = play(engine, tmp_path)
    messages = load_harness("bash").opening(TASK)
    for turn in trajectory.turns:
        messages.append(Message(role=Role.assistant, content=turn.action))
        if turn.observation:
            messages.append(Message(role=Role.user, content=turn.observation))
    whole = Conversation(tokenizer(), EncodingConfig())
    whole.append(messages)
    assert np.concatenate([block.ids_T for block in blocks]).tolist() == whole.ids


def test_every_sampling_field_is_sent(tmp_path):
    # public case 39: nothing is filled in from a model's defaults
    engine = turns(say("exit"))
    play(engine, tmp_path, sampling=SamplingConfig(temperature=0.7, top_p=0.9, top_k=20), max_turn_tokens=33)
    (_, _, params), *_ = engine.requests
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.9, 20)
    assert (params.max_tokens, params.stop_ids) == (33, (tokenizer().special.eos,))
    assert params.seed == sampling_seed(0, "000-000000-000")


def test_the_limit_is_per_turn(tmp_path):
    # public case 61: three turns at the cap of one turn are all kept
    cap = len(say("cat out.txt"))
    trajectory, _ = play(turns(say("cat out.txt"), say("cat out.txt"), say("exit")), tmp_path, max_turn_tokens=cap)
    assert [turn.num_sampled_tokens for turn in trajectory.turns] == [cap, cap, len(say("exit"))]
    assert trajectory.outcome is Outcome.finished


def test_a_turn_cut_at_its_limit_is_graded_as_it_stands_and_not_run(tmp_path):
    trajectory, blocks = play(
        turns(say("echo amber > out.txt"), say("echo nothing > out.txt")),
        tmp_path,
        max_turn_tokens=len(say("echo amber > out.txt")) - 1,
    )
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.budget_exhausted, StopReason.max_tokens)
    assert len(trajectory.turns) == 1
    assert trajectory.reward == 0.0, "the cut command was not run"
    assert not (blocks[-1].ids_T == tokenizer().special.eos)[-1]


def test_the_context_limit_ends_the_episode(tmp_path):
    engine = turns(say("cat out.txt"), say("cat out.txt"), say("cat out.txt"))
    limit = 60
    trajectory, blocks = play(engine, tmp_path, max_context_tokens=limit)
    assert trajectory.stop_reason is StopReason.context_limit
    assert sum(len(block) for block in blocks) <= limit


def test_a_prompt_beyond_the_context_is_no_verdict_on_the_policy(tmp_path):
    trajectory, _ = play(turns(say("exit")), tmp_path, max_context_tokens=3)
    assert trajectory.outcome is Outcome.infra_failed
    assert "episode.max_context_tokens is 3" in trajectory.error


def test_an_aborted_turn_goes_on_with_the_budget_that_is_left(tmp_path):
    # public case 72: budget 30, some sampled before the abort, the rest afterwards; never more, nothing twice
    filler = tokenizer().encode("a")[0]
    engine = ScriptedEngine(lambda ids, sampling, version: [filler] * 100, step_s=0.01)

    async def abort_once(loop):
        while not engine.requests:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        await loop.abort(engine.requests[0][0])

    trajectory, blocks = play(engine, tmp_path, at_start=abort_once, max_turn_tokens=30)
    (first_id, prompt, _), (second_id, resumed, params) = engine.requests
    partial = len(resumed) - len(prompt)
    assert first_id != second_id
    assert 0 < partial < 30
    assert params.max_tokens == 30 - partial
    assert blocks[0].sampled_T.sum() == 30
    assert len(blocks[0].prefills) == 2, "each request made its own prefill"
    assert trajectory.stop_reason is StopReason.max_tokens


def test_age_counts_from_the_oldest_token(tmp_path):
    # public case 65: dispatched at version 3, the weights move to 5 on the way
    filler = tokenizer().encode("a")[0]
    engine = ScriptedEngine(lambda ids, sampling, version: [filler] * 100, step_s=0.01)
    engine.policy_version = 3

    async def move(loop):
        while not engine.requests:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.08)
        await loop._command(lambda: engine.update_weights({}, 5))

    _, blocks = play(engine, tmp_path, at_start=move, max_turn_tokens=30)
    versions = blocks[0].version_T[blocks[0].sampled_T]
    assert set(versions.tolist()) == {3, 5}
    assert (np.diff(versions) >= 0).all()


def test_dropped_reasoning_opens_a_new_context_and_cuts_none(tmp_path):
    # public case 57: the format rewrites the past at a new user turn
    special = tokenizer().special
    thought = [*tokenizer().encode("amber"), special.end_think]
    engine = ScriptedEngine(
        lambda ids, sampling, version: [*thought, *say("exit" if ids.count(special.assistant) == 2 else "cat out.txt")]
    )
    encoding = EncodingConfig(thinking=True, history="drop")
    trajectory, blocks = play(engine, tmp_path, encoding=encoding)
    assert [context.reason for context in trajectory.contexts] == ["root", "rewrite"]
    assert [block.context_id for block in blocks] == ["0", "1"]
    assert [block.start for block in blocks] == [0, 0]
    sampled = np.concatenate([block.ids_T[block.sampled_T] for block in blocks]).tolist()
    assert sampled == [*thought, *say("cat out.txt"), *thought, *say("exit")], "each sampled token in one context"
    assert trajectory.num_sampled == len(sampled)


@pytest.mark.parametrize("fault", ["length", "prompt", "lp", "kept"])
def test_an_answer_that_breaks_the_token_contract_is_refused(tmp_path, fault):
    class Faulty(ScriptedEngine):
        def step(self):
            ended = super().step()
            for answer in ended:
                if fault == "length":
                    answer.ids += answer.ids
                elif fault == "prompt":
                    answer.prompt_len -= 1
                elif fault == "lp":
                    answer.lp_behaviour = [float("nan")] * len(answer.ids)
                else:
                    answer.kept = [[0]] * len(answer.ids)
            return ended

    trajectory, _ = play(Faulty(lambda ids, sampling, version: say("exit")), tmp_path, max_turn_tokens=len(say("exit")))
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.infra_failed, StopReason.generation_error)
    assert not trajectory.has_reward


def test_the_oracle_speaks_one_command_a_turn(tmp_path):
    task = Task(id="t", path=tmp_path, instruction="", config=TaskConfig(), content_hash="")
    (tmp_path / "solution").mkdir()
    script = tmp_path / "solution" / "solve.sh"
    script.write_text("#!/bin/bash\n# look first\ncat note.txt\n\necho a > b\n")
    assert solution_commands(task) == ["cat note.txt", "echo a > b"]
    agent = oracle(task, load_harness("bash"))
    assert [asyncio.run(agent.speak(0.0)).content for _ in range(3)] == ["cat note.txt", "echo a > b", "exit"]
    script.write_text("for i in 1 2; do\n  echo $i\ndone\n")
    assert solution_commands(task) == [script.read_text().rstrip("\n")], "a construct that spans lines stays whole"


def test_seeds_differ_by_slot_and_run_and_not_by_attempt():
    assert len({sampling_seed(run, f"000-000000-{i:03d}") for i in range(50) for run in (0, 1)}) == 100
    assert sampling_seed(7, "000-000001-002") == sampling_seed(7, "000-000001-002")
    assert all(0 <= sampling_seed(0, str(i)) < 2**63 for i in range(1000))
