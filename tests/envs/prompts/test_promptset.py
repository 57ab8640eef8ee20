"""A prompt file as a task set: order, splits, the hash that names it, and what the oracle says."""

import json
import logging

import pytest

from burnish.envs.errors import UserError
from burnish.envs.prompts.config import PromptData, PromptFormat
from burnish.envs.prompts.promptset import Prompt, completion_artifacts, completion_of, load_prompts


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def sums(count, start=0):
    return [{"prompt": f"{i} + {i}", "answer": str(2 * i)} for i in range(start, start + count)]


def test_prompts_are_tasks_in_the_order_of_the_file(tmp_path):
    prompts = load_prompts(PromptData(path=write(tmp_path / "p.jsonl", sums(3))))
    assert [prompt.id for prompt in prompts.split("train")] == ["prompt-000001", "prompt-000002", "prompt-000003"]
    first = prompts.tasks[0]
    assert isinstance(first, Prompt)
    assert (first.instruction, first.answer) == ("0 + 0", "0")
    assert first.where == f"{tmp_path}/p.jsonl line 1"
    assert first.messages == [{"role": "user", "content": "0 + 0"}]
    assert set(prompts.splits) == {"train"}


def test_equal_prompts_stay_two_tasks(tmp_path):
    prompts = load_prompts(PromptData(path=write(tmp_path / "p.jsonl", sums(1) * 2)))
    assert len({prompt.id for prompt in prompts.tasks}) == 2


def test_the_hash_names_content_and_reading(tmp_path):
    path = write(tmp_path / "p.jsonl", sums(8))
    first = load_prompts(PromptData(path=path)).content_hash
    (tmp_path / "sub").mkdir()
    assert load_prompts(PromptData(path=write(tmp_path / "sub" / "q.jsonl", sums(8)))).content_hash == first, "the name"
    others = [
        PromptData(path=path, suffix="?"),
        PromptData(path=path, system="Be brief."),
        PromptData(path=path, heldout_fraction=0.5),
        PromptData(path=path, reward_range=[-1.0, 1.0]),
        PromptData(path=path, format=PromptFormat.trl),
        PromptData(path=write(tmp_path / "r.jsonl", [*sums(7), {"prompt": "7 + 7", "answer": "15"}])),
        PromptData(path=write(tmp_path / "s.jsonl", [*sums(7), {"prompt": "7 + 7", "answer": "14", "level": 2}])),
    ]
    hashes = [load_prompts(data).content_hash for data in others]
    assert len({first, *hashes}) == 1 + len(others)


def test_a_share_is_held_out_by_what_is_asked(tmp_path):
    path = write(tmp_path / "p.jsonl", sums(400) + sums(400))
    prompts = load_prompts(PromptData(path=path, heldout_fraction=0.25))
    asked = {name: {prompt.instruction for prompt in prompts.split(name)} for name in ("train", "heldout")}
    assert not asked["train"] & asked["heldout"], "a repeated prompt is on one side"
    assert len(prompts.split("train")) + len(prompts.split("heldout")) == 800
    assert 0.18 < len(asked["heldout"]) / 400 < 0.32
    # more prompts, or other answers, move nobody to the other side
    more = [{**record, "answer": "?"} for record in sums(500)]
    again = load_prompts(PromptData(path=write(tmp_path / "q.jsonl", more), heldout_fraction=0.25))
    assert {prompt.instruction for prompt in again.split("heldout")} & asked["train"] == set()


def test_a_file_of_its_own_is_held_out_and_shared_prompts_are_told(tmp_path, caplog):
    train, heldout = write(tmp_path / "a.jsonl", sums(5)), write(tmp_path / "b.jsonl", sums(3, start=4))
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(PromptData(path=train, heldout_path=heldout))
    assert [prompt.id for prompt in prompts.split("heldout")] == [f"heldout-{i:06d}" for i in (1, 2, 3)]
    assert "1 of 3 held-out prompts are trained on too" in caplog.text
    assert "b.jsonl line 1 is" in caplog.text


@pytest.mark.parametrize(
    ("records", "changes", "says"),
    [
        ([], {}, "p.jsonl: no prompt in it"),
        (sums(1), {"heldout_fraction": 0.5}, "of 1 prompts leaves none for"),
        ([{"prompt": "a"}], {}, "p.jsonl line 1: column answer is missing"),
    ],
)
def test_a_set_that_cannot_be_used_is_named(tmp_path, records, changes, says):
    with pytest.raises(UserError, match=says):
        load_prompts(PromptData(path=write(tmp_path / "p.jsonl", records), **changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"heldout_fraction": 1.0}, r"data.heldout_fraction must be in \[0, 1\), got 1.0"),
        ({"heldout_fraction": 0.5, "heldout_path": "b"}, "two ways to hold out"),
        ({"path": "", "heldout_path": "b"}, "need data.path=FILE"),
        ({"reward_range": [1.0, 0.0]}, "data.reward_range must be"),
        ({"reward_range": [0.0]}, "data.reward_range must be"),
    ],
)
def test_contradictions_are_found_before_a_file_is_read(changes, says):
    with pytest.raises(UserError, match=says):
        PromptData(**{"path": "a"} | changes)


def test_what_is_said_before_and_after_a_prompt(tmp_path):
    chat = {"prompt": [{"role": "user", "content": "2 + 2"}], "answer": "4"}
    path = write(tmp_path / "p.jsonl", [chat, {"prompt": "3 + 3", "answer": "6"}])
    first, second = load_prompts(PromptData(path=path, system="Be brief.", suffix=" = ?")).tasks
    system = {"role": "system", "content": "Be brief."}
    assert first.messages == [system, {"role": "user", "content": "2 + 2 = ?"}]
    assert second.messages == [system, {"role": "user", "content": "3 + 3 = ?"}]
    plain = load_prompts(PromptData(path=path, suffix=" = ?")).tasks[1]
    assert plain.question == "3 + 3 = ?", "still text: reward functions get the form that the file has"
    own = write(tmp_path / "q.jsonl", [{"prompt": [system, *chat["prompt"]], "answer": "4"}])
    with pytest.raises(UserError, match=r"q.jsonl line 1: .*system message of their own"):
        load_prompts(PromptData(path=own, system="Be brief."))


def test_the_oracle_says_the_answer(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"prompt": "a", "answer": answer} for answer in ("(1, 2)", 4, 0.5, [1], True)])
    prompts = load_prompts(PromptData(path=path)).tasks
    assert [prompt.solution_lines() for prompt in prompts[:3]] == [["(1, 2)"], ["4"], ["0.5"]]
    for prompt in prompts[3:]:
        with pytest.raises(UserError, match=r"line [45]: no answer that the oracle could say"):
            prompt.solution_lines()


@pytest.mark.parametrize("text", ["", "São 价格", "half \ud800", "a\nb\n", "\0"])
def test_a_completion_survives_as_an_artifact(text):
    artifacts = completion_artifacts(text)
    assert completion_of(artifacts) == text
    assert artifacts.content_hash == completion_artifacts(text).content_hash
