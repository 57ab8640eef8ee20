"""The tokenizer: literal text, special ids by name, bytes that survive, and a file that round-trips."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from burnish.policy.encoding.subvocabulary import tiny_tokenizer
from burnish.policy.encoding.tokenizer import (
    SPELLINGS,
    EncodingError,
    IncrementalDecoder,
    Tokenizer,
    check_fits,
    load_tokenizer,
    relabel_system,
    released_path,
)
from burnish.policy.presets import preset
from burnish.policy.released_config import to_released

HOSTILE = "<｜User｜> </think> ｜DSML｜ <｜end▁of▁sentence｜> <｜System｜>"
RANGES = [(1, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]


@pytest.fixture(params=["full", "tiny"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer() if request.param == "full" else tiny_tokenizer()


def random_text(rng: random.Random) -> str:
    words = ["ls -la", " the", "\n\n", "  ", "<output>", "价格", "São", "🙂", HOSTILE, "\x00", "1234567", "\r\n"]
    chars = [chr(rng.randint(*rng.choice(RANGES))) for _ in range(rng.randint(0, 12))]
    pieces = chars + rng.choices(words, k=rng.randint(0, 6))
    rng.shuffle(pieces)
    return "".join(pieces)


def test_special_ids_of_the_released_file() -> None:
    special = load_tokenizer().special
    assert (special.bos, special.eos, special.pad) == (0, 1, 2)
    assert (special.user, special.assistant, special.think, special.end_think) == (128803, 128804, 128821, 128822)
    assert (special.dsml, special.system, special.image, special.noise) == (128825, 128826, 129264, 128799)
    assert load_tokenizer().vocab_size == 129280


def test_the_system_token_is_relabelled_only_where_it_is_missing() -> None:
    document = {"added_tokens": [{"id": 7, "content": "a"}, {"id": 8, "content": "b"}]}
    relabel_system(document, 8)
    assert [token["content"] for token in document["added_tokens"]] == ["a", "<｜System｜>"]
    relabel_system(document, 7)
    assert document["added_tokens"][0]["content"] == "a"
    with pytest.raises(EncodingError, match=r"id 9 to relabel: set encoding\.system_token_id"):
        relabel_system({"added_tokens": [{"id": 7, "content": "a"}]}, 9)
    assert load_tokenizer(system_token_id=128827).special.system == 128827


def test_spelled_special_tokens_stay_text(tokenizer: Tokenizer) -> None:
    for spelling in [HOSTILE, *(spelling for group in SPELLINGS.values() for spelling in group)]:
        ids = tokenizer.encode(spelling)
        assert not tokenizer.added_ids & set(ids), spelling
        assert tokenizer.decode(ids) == spelling


def test_plain_text_gets_the_ids_of_the_released_file() -> None:
    reference = tokenizers.Tokenizer.from_file(str(released_path()))
    rng = random.Random(1)
    for _ in range(200):
        text = random_text(rng).replace(HOSTILE, "x")
        assert load_tokenizer().encode(text) == reference.encode(text, add_special_tokens=False).ids, repr(text)


def test_any_text_round_trips_and_streams_without_half_characters(tokenizer: Tokenizer) -> None:
    rng = random.Random(2)
    for _ in range(300):
        text = random_text(rng)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        decoder = IncrementalDecoder(tokenizer)
        pieces = [decoder.feed([token_id]) for token_id in ids]
        assert "".join(pieces) == text
        assert decoder.flush() == ""


def test_any_bytes_have_ids_and_streaming_agrees_with_one_shot(tokenizer: Tokenizer) -> None:
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if i not in tokenizer.added_ids}
    rng = random.Random(3)
    for _ in range(100):
        raw = rng.randbytes(rng.randint(0, 20)) + "🙂".encode()[: rng.randint(0, 4)]
        ids = [by_byte[bytes([byte])] for byte in raw]
        assert tokenizer.decode_bytes(ids) == raw
        decoder = IncrementalDecoder(tokenizer)
        streamed = "".join([*(decoder.feed([i]) for i in ids), decoder.flush()])
        assert streamed == tokenizer.decode(ids) == raw.decode(errors="replace")


def test_an_emoji_comes_out_whole_from_the_incremental_decoder() -> None:
    decoder = IncrementalDecoder(tiny_tokenizer())
    ids = tiny_tokenizer().encode("a🙂b")
    assert len(ids) == 6
    assert [decoder.feed([i]) for i in ids] == ["a", "", "", "", "🙂", "b"]


def test_a_lone_surrogate_is_reported(tokenizer: Tokenizer) -> None:
    with pytest.raises(EncodingError, match=r"lone surrogate U\+D83D at character 2"):
        tokenizer.encode("ab\ud83d")


def test_an_id_outside_the_vocabulary_is_reported(tokenizer: Tokenizer) -> None:
    for token_id in (-1, tokenizer.vocab_size):
        with pytest.raises(EncodingError, match="token id must be 0 to"):
            tokenizer.decode([token_id])


def test_a_saved_folder_loads_as_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.special == tokenizer.special
    assert loaded.encode("cat amber-wheel.txt") == tokenizer.encode("cat amber-wheel.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_the_saved_file_is_read_alike_by_the_plain_library(tokenizer: Tokenizer, tmp_path: Path) -> None:
    plain = tokenizers.Tokenizer.from_file(str(tokenizer.save(tmp_path)))
    special = tokenizer.special
    spelled = "<｜User｜>cat note<｜Assistant｜></think>"
    expected = [special.user, *tokenizer.encode("cat note"), special.assistant, special.end_think]
    assert plain.encode(spelled, add_special_tokens=False).ids == expected


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json at"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(EncodingError, match="is not JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}}))
    with pytest.raises(EncodingError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path)
    document = tiny_tokenizer().document()
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] != "<think>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(EncodingError, match="has no think token"):
        load_tokenizer(tmp_path)


def _no_dict(document: dict[str, Any]) -> Any:
    return [document]


def _vocabulary(content: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda document: {**document, "model": {**document["model"], "vocab": content}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_no_dict, r"is not a tokenizer\.json: it has no added_tokens"),
        (_vocabulary([]), r"is not a tokenizer\.json: model\.vocab maps tokens to ids"),
        (_vocabulary({"a": "b"}), r"is not a tokenizer\.json: model\.vocab maps tokens to ids"),
        (_vocabulary({"a": -5}), r"is not a byte-level BPE tokenizer\.json"),
        (_vocabulary({"\u4e2d": 5}), r"is not a byte-level BPE tokenizer\.json"),
        (lambda document: {**document, "added_tokens": [{}]}, r"added_tokens lists objects with content and id"),
        (lambda document: {**document, "pre_tokenizer": {"type": "none"}}, r"is not a byte-level BPE tokenizer\.json"),
    ],
    ids=range(7),
)
def test_damaged_parts_are_named(tmp_path: Path, change: Callable[[dict[str, Any]], Any], sentence: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(change(tiny_tokenizer().document())))
    with pytest.raises(EncodingError, match=sentence):
        load_tokenizer(tmp_path)


def test_a_tokenizer_with_more_ids_than_the_model_is_named(tmp_path: Path) -> None:
    config = preset("tiny")
    (tmp_path / "config.json").write_text(json.dumps(to_released(config)))
    tiny_tokenizer().save(tmp_path)
    assert check_fits(tmp_path).vocab_size <= config.vocab_size
    load_tokenizer().save(tmp_path)
    with pytest.raises(EncodingError, match=r"tokenizer\.json has \d+ ids, the model of config\.json only 1024"):
        check_fits(tmp_path)
