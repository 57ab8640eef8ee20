"""The tiny sub-vocabulary: rebuilt from its texts, a true subset of the real tokenizer, compact on the generated tasks."""

import json
import random

import pytest

from burnish.envs.synthesis.generate import DIFFICULTIES, FAMILIES, generate
from burnish.envs.synthesis.words import CODE_WORDS, FIRST_WORDS, SECOND_WORDS
from burnish.policy.encoding.subvocabulary import TINY_FILE, TINY_SIZE, build_subvocabulary, tiny_tokenizer
from burnish.policy.encoding.tokenizer import EncodingError, load_tokenizer

CONTENT = json.loads(TINY_FILE.read_text())


def test_the_committed_ids_are_what_the_builder_makes_of_the_committed_texts() -> None:
    assert build_subvocabulary(CONTENT["texts"], TINY_SIZE, load_tokenizer()) == CONTENT["ids"]
    assert tiny_tokenizer().vocab_size == TINY_SIZE == len(CONTENT["ids"]) == 1024


def test_every_id_stands_for_the_bytes_of_its_original() -> None:
    full, tiny = load_tokenizer(), tiny_tokenizer()
    for compact, original in enumerate(CONTENT["ids"]):
        assert tiny.token_bytes(compact) == full.token_bytes(original)
        assert (compact in tiny.added_ids) == (original in full.added_ids)
    singles = {tiny.token_bytes(i) for i in range(TINY_SIZE) if len(tiny.token_bytes(i)) == 1}
    assert len(singles) == 256


def test_its_merges_are_the_originals_in_the_originals_order() -> None:
    full = [tuple(merge.split(" ")) for merge in load_tokenizer().document()["model"]["merges"]]
    rank = {merge: index for index, merge in enumerate(full)}
    ranks = [rank[tuple(merge)] for merge in tiny_tokenizer().document()["model"]["merges"]]
    assert len(ranks) > 100
    assert ranks == sorted(ranks)


def test_its_texts_get_the_tokens_of_the_full_tokenizer() -> None:
    full, tiny = load_tokenizer(), tiny_tokenizer()
    for text in CONTENT["texts"]:
        assert [CONTENT["ids"][i] for i in tiny.encode(text)] == full.encode(text), repr(text)


def test_every_word_of_the_families_is_one_token() -> None:
    tiny = tiny_tokenizer()
    words = [prefix + word for word in FIRST_WORDS for prefix in ("", " ")]
    # these two stand nowhere else than behind a first word
    words += [f"-{word}" for word in SECOND_WORDS] + [f"_{word}" for word in CODE_WORDS]
    split = {word: len(tiny.encode(word)) for word in words if len(tiny.encode(word)) != 1}
    assert not split


def test_too_many_texts_for_the_size_are_refused() -> None:
    with pytest.raises(EncodingError, match="more than size 300"):
        build_subvocabulary(CONTENT["texts"], 300, load_tokenizer())


def generated_texts() -> list[str]:
    texts: list[str] = []
    for family in FAMILIES:
        for difficulty in DIFFICULTIES:
            for number in range(4):
                split = ("train", "heldout")[number % 2]
                spec = generate(family, difficulty, random.Random(f"{family}{difficulty}{number}"), split=split)
                outputs = [f"<output>\n{turn.output}\n</output>" for turn in spec.turns]
                texts += [spec.instruction, *(turn.command for turn in spec.turns), *outputs]
    return texts


def test_generated_tasks_encode_as_with_the_full_tokenizer_and_compactly() -> None:
    full, tiny = load_tokenizer(), tiny_tokenizer()
    words = {word for text in generated_texts() for word in full.split_words(text)}
    missing = sorted(word for word in words if [CONTENT["ids"][i] for i in tiny.encode(word)] != full.encode(word))
    assert not missing, f"put these into the texts of {TINY_FILE.name} and rewrite its ids: {missing}"
    num_tokens = num_words = 0
    for text in generated_texts():
        ids = tiny.encode(text)
        assert [CONTENT["ids"][i] for i in ids] == full.encode(text), text
        num_tokens += len(ids)
        # the pre-tokeniser's words: no tokenizer of this family can do better than one token each
        num_words += len(full.split_words(text))
    assert num_words > 5000
    assert num_tokens / num_words < 1.15, f"{num_tokens} tokens for {num_words} words"
