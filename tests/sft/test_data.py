"""SFT data: strict, nothing filled in, nothing cut or dropped unseen."""

import json
from pathlib import Path

import pytest

from burnish.policy.encoding.config import EncodingConfig
from burnish.policy.encoding.render import Rendered
from burnish.policy.encoding.subvocabulary import tiny_tokenizer
from burnish.policy.encoding.tokenizer import load_tokenizer
from burnish.policy.training.config import BatchConfig
from burnish.policy.training.packing import Sample, pack
from burnish.sft.config import DataConfig, DataFormat, OnOverflow
from burnish.sft.data import Counts, DataError, Order, _check_terminators, fit, load, loss_tokens, micro_batches

ASK = {"role": "user", "content": "Write one."}
ANSWER = {"role": "assistant", "content": "echo one"}


def write(path: Path, records: list) -> Path:
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    return path


def read(path: Path, tokenizer=None, **settings):
    config = DataConfig(path=str(path), **settings)
    return load(path, config, tokenizer or tiny_tokenizer(), EncodingConfig())


def test_oracle_trajectories_train_on_assistant_tokens_only(oracle_file):
    dataset, counts = read(oracle_file)
    tokenizer = tiny_tokenizer()
    record = json.loads(oracle_file.read_text().splitlines()[0])
    row = dataset[0]
    trained = [i for i, m in zip(row["ids"], row["loss_mask"], strict=True) if m]
    turns = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
    expected = [i for turn in turns for i in [*tokenizer.encode(turn), tokenizer.special.eos]]
    assert trained == expected
    assert (counts.conversations, counts.dropped, counts.lost_tokens) == (20, 0, 0)
    assert counts.loss_tokens == sum(map(sum, dataset["loss_mask"]))


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ('{"messages": [}\n', r"data\.jsonl line 2: not JSON \(Expecting value at column 15\)"),
        ('{"messages": [\n', r"data\.jsonl line 2: not JSON"),
        ("[1]\n", r"line 2: expected a JSON object, got list"),
        ({"message": [ASK]}, r"line 2: field 'messages' is missing; format chat needs messages"),
        (
            {"messages": [ASK, ANSWER], "metadata": 1},
            r"line 2: unknown field 'metadata'; format chat knows messages, tools",
        ),
        ({"messages": []}, r"line 2: 'messages' must be a list of at least one message"),
        ({"messages": [ASK, {"role": "bot", "content": "x"}]}, r"line 2: messages\[1\]\.role must be one of"),
        ({"messages": [ASK, ANSWER | {"weight": 1}]}, r"line 2: unknown field 'messages\[1\]\.weight'"),
        ({"messages": [ASK]}, r"line 2: no assistant message"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path, bad, sentence):
    path = write(tmp_path / "data.jsonl", [{"messages": [ASK, ANSWER]}, bad])
    with pytest.raises(DataError, match=sentence):
        read(path)


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"messages": "\xff"}\n')
    with pytest.raises(DataError, match="line 1: not UTF-8"):
        read(path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"expected a \.jsonl or \.parquet file, got the ending '\.csv'"):
        read(write(tmp_path / "data.csv", []))
    with pytest.raises(FileNotFoundError, match="no data file at"):
        read(tmp_path / "none.jsonl")


def test_a_line_separator_inside_text_is_not_a_line_break(tmp_path):
    odd = "one\u2028two\u0085three\r"
    path = write(tmp_path / "data.jsonl", [{"messages": [ASK, {"role": "assistant", "content": odd}]}] * 2)
    dataset, _ = read(path, load_tokenizer())
    assert dataset["line"][:] == [1, 2]
    assert odd in load_tokenizer().decode(dataset[0]["ids"])


def call(name: str, arguments: str) -> dict:
    return {"id": "", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_tool_arguments_are_not_filled_with_other_tools_keys(tmp_path):
    """C05: columnar loading would give every call the union of all keys."""
    rows = [
        {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call("move", '{"x":0,"y":1}')]}]},
        {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call("say", '{"text":"hi"}')]}]},
        {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call("move", '{"x":null}')]}]},
        {"messages": [{"role": "user", "content": "None"}, ANSWER]},
    ]
    tokenizer = load_tokenizer()
    path = write(tmp_path / "data.jsonl", rows)
    texts = [tokenizer.decode(ids) for ids in read(path, tokenizer)[0]["ids"]]
    assert texts[0].count("parameter name=") == 2
    assert texts[1].count("parameter name=") == 1
    assert 'name="x" string="false">null<' in texts[2]
    assert [text.count("None") for text in texts] == [0, 0, 0, 1]
    assert texts[3].count("None") == 1


def test_parquet_with_json_text_equals_jsonl_and_struct_arguments_are_refused(tmp_path):
    from datasets import Dataset

    messages = [ASK, {"role": "assistant", "content": None, "tool_calls": [call("say", '{"text":"hi"}')]}]
    tokenizer = load_tokenizer()
    plain = write(tmp_path / "data.jsonl", [{"messages": messages}, {"messages": [ASK, ANSWER]}])
    as_text = [{"messages": json.dumps(messages)}, {"messages": json.dumps([ASK, ANSWER])}]
    Dataset.from_list(as_text).to_parquet(tmp_path / "text.parquet")
    Dataset.from_list([{"messages": messages}, {"messages": [ASK, ANSWER]}]).to_parquet(tmp_path / "struct.parquet")
    expected = read(plain, tokenizer)[0]["ids"][:]
    assert read(tmp_path / "text.parquet", tokenizer)[0]["ids"][:] == expected
    assert read(tmp_path / "struct.parquet", tokenizer)[0]["ids"][:] == expected
    merged = [ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "say", "arguments": {"text": "hi"}}}]}]
    Dataset.from_list([{"messages": merged}]).to_parquet(tmp_path / "merged.parquet")
    with pytest.raises(DataError, match=r"row 1: tool arguments are stored as columns.*JSON text"):
        read(tmp_path / "merged.parquet", tokenizer)


def test_an_assistant_turn_without_a_trained_end_is_refused():
    """C02: ids of a template that ends turns with 106, with a mask that looked for another token."""
    ids = [2, 105, 11, 107, 50, 51, 106, 107, 105, 12, 107, 60, 61, 106, 107]
    right = [False] * 11 + [True, True, True, False]
    wrong = [False] * 11 + [True, True, False, False]
    _check_terminators(Rendered(ids, right), "here", 106)
    with pytest.raises(DataError, match="here: an assistant turn ends at token 12 without"):
        _check_terminators(Rendered(ids, wrong), "here", 106)


def test_too_long_conversations_follow_the_policy_and_are_counted():
    """C06: lengths 13, 4, 6, 2, 10 into bins of 10: 32 of 35 tokens kept by truncation, none re-queued."""
    sequences = [list(range(100, 113)), list(range(200, 204)), list(range(300, 306)), [400, 401], list(range(500, 510))]
    counts, samples = Counts(), []
    for ids in sequences:
        config = DataConfig(path="-", max_tokens=10, on_overflow=OnOverflow.truncate)
        kept = fit(Rendered(ids, [True] * len(ids)), "-", config, counts)
        assert kept is not None
        samples.append(Sample(ids=kept.ids, loss_mask=kept.loss_mask))
    bins = pack(samples, 10)
    assert [batch.rows.token_id[: batch.num_tokens].tolist() for batch in bins] == [
        list(range(100, 110)),
        list(range(500, 510)),
        [*range(300, 306), *range(200, 204)],
        [400, 401],
    ]
    assert bins[2].rows.position[:10].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert not bins[2].loss_mask[5], "the last token of a segment must not predict the next segment"
    assert (counts.truncated, counts.lost_tokens, sum(b.num_tokens for b in bins)) == (1, 3, 32)
    dropped = Counts()
    config = DataConfig(path="-", max_tokens=10, on_overflow=OnOverflow.drop)
    assert fit(Rendered(sequences[0], [True] * 13), "-", config, dropped) is None
    assert (dropped.dropped, dropped.lost_tokens) == (1, 13)
    with pytest.raises(DataError, match=r"line 7: 13 tokens, more than data.max_tokens=10"):
        fit(Rendered(sequences[0], [True] * 13), "line 7", DataConfig(path="-", max_tokens=10), dropped)


def test_every_conversation_comes_once_an_epoch_and_a_cursor_is_enough():
    order = Order(num_conversations=10, batch_size=4, seed=3)
    assert order.batches_per_epoch == 3
    for epoch in range(3):
        seen = [i for place in range(3) for i in order.batch(3 * epoch + place)]
        assert sorted(seen) == list(range(10))
    assert order.batch(1) != order.batch(4), "epochs differ in order"
    assert order.batch(4) == Order(num_conversations=10, batch_size=4, seed=3).batch(4)


def test_micro_batches_share_one_denominator(oracle_file):
    dataset, counts = read(oracle_file, format=DataFormat.transcript)
    for batch in (
        BatchConfig(batch_size=20, micro_batch_size=5),
        BatchConfig(batch_size=20, tokens_per_micro_batch=256),
    ):
        assert loss_tokens(micro_batches(dataset, range(20), batch)) == counts.loss_tokens
    assert len(micro_batches(dataset, range(20), BatchConfig(batch_size=20, micro_batch_size=5))) == 4


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"[" * 60_000, r"line 2: not JSON that can be read"),
        (b'{"messages": ' + b"[" * 60_000, r"line 2: not JSON that can be read"),
        (b'{"messages": ' + b"1" * 5000 + b"}", r"line 2: not JSON that can be read"),
        ('{"messages": []}'.encode("utf-16"), r"line 2: not UTF-8"),
        (b"PAR1\x00", r"line 2: not JSON"),
    ],
    ids=["brackets", "deep", "digits", "utf-16", "parquet"],
)
def test_a_line_that_no_parser_takes_is_named(tmp_path, line, sentence):
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps({"messages": [ASK, ANSWER]}).encode() + b"\n" + line + b"\n")
    with pytest.raises(DataError, match=sentence):
        read(path)


def test_windows_files_are_read(tmp_path):
    line = json.dumps({"messages": [ASK, ANSWER]}).encode()
    (tmp_path / "data.jsonl").write_bytes(b"\xef\xbb\xbf" + line + b"\r\n" + line + b"\r\n\r\n")
    assert read(tmp_path / "data.jsonl")[1].conversations == 2


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"messages": [ASK, ANSWER], "tools": 3}, r"line 1: tools must be a list of functions, got int"),
        (
            {"messages": [{"role": "system", "content": "x", "tools": 3}, ASK, ANSWER]},
            r"messages\[0\]\.tools must be a",
        ),
        (
            {"messages": [ASK | {"tool_calls": [{"name": "f"}]}, ANSWER]},
            r"messages\[0\]\.tool_calls belongs to a message",
        ),
        (
            {"messages": [ASK | {"reasoning": "why"}, ANSWER]},
            r"messages\[0\]\.reasoning belongs to a message of assistant",
        ),
        ({"messages": [ASK, ANSWER | {"tool_call_id": "1"}]}, r"tool_call_id belongs to a message of tool"),
        (
            {"messages": [{"role": "user", "content": None}, ANSWER]},
            r"messages\[0\]\.content is null or missing; a user",
        ),
        ({"messages": [{"role": "user"}, ANSWER]}, r"messages\[0\]\.content is null or missing; a user"),
        ({"messages": [ASK, {"role": "assistant", "content": None}]}, r"messages\[1\] says nothing"),
        ({"messages": [ASK, {"role": "assistant", "content": ""}]}, r"messages\[1\] says nothing"),
        ({"messages": [{"role": "user", "content": "\ud800"}, ANSWER]}, r"line 1: text has a lone surrogate U\+D800"),
        (
            {"messages": [ASK, {"role": "assistant", "tool_calls": [call("f", "[" * 60_000)]}]},
            r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is not JSON",
        ),
    ],
)
def test_what_would_be_lost_or_teach_nothing_is_named(tmp_path, record, sentence):
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match=sentence):
        read(tmp_path / "data.jsonl")


def test_a_damaged_parquet_file_is_named(tmp_path):
    from datasets import Dataset

    whole = tmp_path / "whole.parquet"
    Dataset.from_list([{"messages": json.dumps([ASK, ANSWER])}] * 3).to_parquet(str(whole))
    for name, content in {"text": b'{"messages": []}\n', "empty": b"", "cut": whole.read_bytes()[:200]}.items():
        path = tmp_path / f"{name}.parquet"
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}\.parquet: not a whole parquet file"):
            read(path)
