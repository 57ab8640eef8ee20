"""Problems of reasoning-gym: the gate, the file they are written to, and what is said where the package is not installed."""

import importlib.util
import json
import random
import sys

import pytest

from burnish.configs.cli import main as burnish
from burnish.envs.errors import UserError
from burnish.envs.prompts.config import PromptData, PromptsRun
from burnish.envs.prompts.generate import main
from burnish.envs.prompts.procedural import family_names, packed, problems_of, unpacked
from burnish.envs.prompts.promptset import completion_artifacts, load_prompts
from burnish.verifiers.config import GradingConfig
from burnish.verifiers.function import FunctionVerifier

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="pip install 'burnish[reasoning-gym]'"
)
WITHOUT_ANSWER = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")


def prompts(tmp_path, **settings) -> list[dict]:
    out = tmp_path / f"rg-{len(list(tmp_path.iterdir()))}.jsonl"
    assert main(PromptsRun(out=str(out), **settings)) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert burnish(["prompts", f"out={tmp_path}/rg.jsonl", "families=[chain_sum]"]) == 2
    complaint = capsys.readouterr().err.strip().splitlines()[-1]
    assert complaint == (
        "burnish prompts: the package reasoning_gym is not installed: pip install 'burnish[reasoning-gym]'"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"source": "gym"}, "source must be reasoning_gym, got 'gym'"),
        ({"num_prompts": 0}, "num_prompts must be >= 1"),
        ({"families": ["a", "b"], "num_prompts": 1}, "num_prompts must be >= 1 a family"),
        ({"families": ["a", "a"]}, "families must be names, each once"),
        ({"families": ["a"], "options": {"b": {}}}, "options.b: families does not name it"),
        ({"seed": -1}, "seed must be >= 0"),
    ],
)
def test_settings_that_nothing_could_be_made_of_are_named(settings, says):
    with pytest.raises(UserError, match=says):
        PromptsRun(out="rg.jsonl", **settings)


def test_values_keep_their_types_through_json():
    value = {"a": (1, [2, (3,)]), "b": {1: "x", (1, 2): {"y"}}, "c": {"__tuple__": 1}, "d": None}
    assert unpacked(json.loads(json.dumps(packed(value)))) == value


@needs_package
def test_every_problem_scores_its_own_answer_and_not_an_empty_one(tmp_path):
    records = prompts(
        tmp_path, families=["chain_sum", "gsm_symbolic", "spell_backward", "rearc"], num_prompts=10, seed=7
    )
    assert [record["data_source"] for record in records[:4]] == ["chain_sum", "gsm_symbolic", "spell_backward", "rearc"]
    assert len(records) == 10
    assert len({record["prompt"] for record in records}) == 10
    file = next(tmp_path.glob("*.jsonl"))
    verifier = FunctionVerifier("reasoning_gym", GradingConfig(processes=1, timeout_s=60))
    try:
        tasks = load_prompts(PromptData(path=str(file))).tasks
        verifier.check(tasks)
        for task in tasks:
            assert task.config.metadata["family"] == task.data_source
            rewards = [
                verifier.verify(task, completion_artifacts(text), run_id="test", attempt_id="a-00").reward
                for text in (
                    task.answer,
                    f"so <answer>0</answer> no: <answer> {task.answer}\n</answer>.",
                    "",
                    "so be it",
                )
            ]
            assert rewards[:2] == [1.0, 1.0], task.data_source
            assert max(rewards[2:]) < 0.5, task.data_source
    finally:
        verifier.close()


@needs_package
def test_the_same_settings_write_the_same_bytes(tmp_path):
    first, second, other = (
        prompts(tmp_path, families=["chain_sum", "zebra_puzzles"], num_prompts=6, seed=s) for s in (1, 1, 2)
    )
    random.seed(99)
    assert first == second == prompts(tmp_path, families=["chain_sum", "zebra_puzzles"], num_prompts=6, seed=1)
    assert first != other


@needs_package
def test_options_of_a_family_are_taken_and_wrong_ones_are_named(tmp_path):
    options = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    records = prompts(tmp_path, families=["chain_sum"], num_prompts=5, options=options)
    assert all(len(record["prompt"].rpartition(":")[2].split()) <= 5 for record in records)
    assert records[0]["options"] == options["chain_sum"]
    for wrong in ({"min_term": 2}, {"min_terms": 5, "max_terms": 2}):
        with pytest.raises(UserError, match="family chain_sum of reasoning_gym with options"):
            prompts(tmp_path, families=["chain_sum"], options={"chain_sum": wrong})


@needs_package
@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("chain_sums", "reasoning_gym has no family 'chain_sums'; did you mean chain_sum"),
        ("sudok", "did you mean sudoku"),
        ("zzzz", "there are ab, acre, advanced_geometry"),
        ("composite", "family composite of reasoning_gym with options {}: Must specify at least one dataset"),
    ],
)
def test_a_family_that_is_not_there_is_named_with_its_neighbours(tmp_path, family, says):
    with pytest.raises(UserError) as caught:
        prompts(tmp_path, families=[family], num_prompts=1)
    assert says in str(caught.value)


@needs_package
@pytest.mark.parametrize("family", WITHOUT_ANSWER)
def test_a_family_whose_own_answer_is_none_passes_no_gate(tmp_path, family):
    with pytest.raises(UserError, match=rf"family {family}: 0 of 1 problems pass the gate .*no answer of its own"):
        prompts(tmp_path, families=[family], num_prompts=1)
    assert not list(tmp_path.iterdir())


@needs_package
@pytest.mark.slow
def test_all_families_but_those_without_an_answer_are_used(tmp_path, caplog):
    records = prompts(tmp_path, num_prompts=100)
    used = {record["data_source"] for record in records}
    assert set(family_names()) - used == {*WITHOUT_ANSWER, "composite"}
    assert len(records) == 100
    for name in WITHOUT_ANSWER:
        assert f"family {name} (" in caplog.text


@needs_package
def test_a_family_with_few_problems_says_so(tmp_path):
    few, reasons = problems_of("chain_sum", 40, 0, {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    assert len(few) == 40 or reasons["the same problem twice"] > 0
    with pytest.raises(UserError, match="of 5000 problems pass the gate"):
        prompts(
            tmp_path,
            families=["chain_sum"],
            num_prompts=5000,
            options={"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}},
        )


@needs_package
def test_a_file_that_is_there_is_not_replaced(tmp_path):
    out = tmp_path / "rg.jsonl"
    out.write_text("mine\n")
    with pytest.raises(UserError, match="is there already"):
        main(PromptsRun(out=str(out), families=["chain_sum"]))
    assert out.read_text() == "mine\n"
    with pytest.raises(UserError, match=r"ends in .jsonl"):
        main(PromptsRun(out=str(tmp_path / "rg.json"), families=["chain_sum"]))
