"""What prompt files hold, in every format; and what is missing or malformed, named with file, line and column."""

import datetime
import json

import pytest

from burnish.envs.errors import UserError
from burnish.envs.prompts.columns import read_fields
from burnish.envs.prompts.config import PromptColumns, PromptData, PromptFormat
from burnish.envs.prompts.records import read_records

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "How many?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0},
}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}]


def data(name="plain", **columns) -> PromptData:
    return PromptData(path="p.jsonl", format=PromptFormat[name], columns=PromptColumns(**columns))


def write(path, *lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return path


def test_a_plain_record_gives_the_rest_as_extra():
    fields = read_fields({"prompt": "2 + 2", "answer": 4, "level": 1, "data_source": "sums"}, "p line 1", data())
    assert (fields.question, fields.answer, fields.data_source) == ("2 + 2", 4, "sums")
    assert fields.extra == {"level": 1}
    assert fields.columns == {"answer": 4, "level": 1, "data_source": "sums"}


def test_a_verl_record():
    fields = read_fields(VERL, "p row 1", data("verl"))
    assert fields.question == VERL["prompt"]
    assert (fields.answer, fields.data_source) == ("72", "openai/gsm8k")
    assert fields.extra == {"split": "train", "index": 0}
    del (bare := dict(VERL))["extra_info"]
    assert read_fields(bare, "p row 1", data("verl")).extra == {}


def test_a_trl_record_keeps_every_column_for_the_reward_function():
    fields = read_fields({"prompt": CHAT, "solution": "4", "tags": ["easy"]}, "p line 1", data("trl"))
    assert fields.question == CHAT
    assert fields.answer is None
    assert fields.columns == {"solution": "4", "tags": ["easy"]}
    assert read_fields({"prompt": "2 + 2"}, "p line 1", data("trl")).question == "2 + 2"


def test_columns_are_named_by_key():
    record = {"question": "2 + 2", "meta": {"gold": "4", "more": {"a": 1}}, "a.b": 2}
    fields = read_fields(record, "p line 1", data(prompt="question", answer="meta.gold", extra="meta.more"))
    assert (fields.question, fields.answer, fields.extra) == ("2 + 2", "4", {"a": 1})
    assert read_fields(record, "p line 1", data(prompt="question", answer="a.b")).answer == 2, "a dot in a name"
    without = read_fields(record, "p line 1", data(prompt="question", answer=None))
    assert without.answer is None
    assert without.extra.keys() == {"meta", "a.b"}
    assert read_fields(VERL, "p row 1", data("verl", answer="ability")).answer == "math"


def test_nulls_that_a_columnar_file_fills_in_are_absence():
    messages = [{"role": "user", "content": "None", "name": None, "tool_calls": None}]
    assert read_fields({"prompt": messages, "answer": "x"}, "p row 1", data()).question == [
        {"role": "user", "content": "None"}
    ], "the user's own word stays"


@pytest.mark.parametrize(
    ("change", "kind", "columns", "says"),
    [
        ({"prompt": ...}, "plain", {}, "p line 7: column prompt is missing (the record has answer); name the right one"),
        ({"answer": ...}, "plain", {}, "column answer is missing (the record has prompt); name the right one with data.columns.answer="),
        ({"answer": None}, "plain", {}, "p line 7: column answer is null"),
        ({"answer": " "}, "plain", {}, "p line 7: column answer is empty"),
        ({"answer": float("nan")}, "plain", {}, "p line 7 column answer: nan is no number"),
        ({"answer": datetime.date(2026, 1, 1)}, "plain", {}, "p line 7 column answer: a date is no JSON value"),
        ({"more": {"x": [b"1"]}}, "plain", {}, "p line 7 column more.x[0]: a bytes is no JSON value"),
        ({"prompt": ""}, "plain", {}, "p line 7 column prompt: empty"),
        ({"prompt": 3}, "plain", {}, "column prompt: a prompt is text or a list of chat messages, got int 3"),
        ({"prompt": []}, "plain", {}, "column prompt: an empty list of messages"),
        ({"prompt": "a\ud800"}, "plain", {}, "column prompt: half a surrogate pair at character 1"),
        ({"prompt": ["hi"]}, "plain", {}, "column prompt[0]: a message is an object with role and content, got str 'hi'"),
        ({"prompt": [{"role": "user"}]}, "plain", {}, "column prompt[0]: field content must be text, got null"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, "plain", {}, "field content must be text, got list"),
        ({"prompt": [{"role": "usr", "content": "a"}]}, "plain", {}, "field role is 'usr'; expected one of system"),
        ({"prompt": [*CHAT, {"role": "assistant", "content": "4"}]}, "plain", {}, "the last message is of assistant"),
        ({"prompt": [{"role": "user", "content": "a", "name": "x"}]}, "plain", {}, "column prompt[0]: field name has no place"),
        ({"extra": 3}, "plain", {"extra": "extra"}, "column extra must be an object, got int 3"),
        ({"data_source": 3}, "plain", {}, "column data_source must be text, got int 3"),
        ({"reward_model": {"ground_truth": "1"}, "answer": ...}, "plain", {}, "is this data.format=verl?"),
        ({"prompt": "text"}, "verl", {}, "column prompt is text; in data.format=verl it is a list of chat messages"),
        ({"reward_model": ...}, "verl", {}, "column reward_model.ground_truth is missing (the record has"),
        ({"reward_model": {"style": "rule"}}, "verl", {}, "column reward_model.ground_truth is missing (reward_model has style)"),
        ({"reward_model": "rule"}, "verl", {}, "ground_truth is missing (reward_model has no object but str 'rule')"),
        ({"reward_model": {"style": "model", "ground_truth": "1"}}, "verl", {}, "reward_model.style is 'model'"),
        ({"data_source": ...}, "verl", {}, "column data_source is missing"),
        ({"extra_info": [1]}, "verl", {}, "column extra_info must be an object, got list [1]"),
        ({}, "trl", {"answer": "gold"}, "column gold is missing"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(change, kind, columns, says):
    record = dict(VERL) if kind == "verl" else {"prompt": "2 + 2", "answer": "4"}
    record |= change
    record = {name: value for name, value in record.items() if value is not ...}
    with pytest.raises(UserError) as caught:
        read_fields(record, "p line 7", data(kind, **columns))
    assert says in str(caught.value)
    assert "p line 7" in str(caught.value)


def test_jsonl_records_come_with_their_lines(tmp_path):
    path = write(tmp_path / "p.jsonl", b'\xef\xbb\xbf{"a": "S\xc3\xa3o"}\n', b"\n", {"a": "价格 5€"})
    assert list(read_records(path)) == [(f"{path} line 1", 1, {"a": "São"}), (f"{path} line 3", 3, {"a": "价格 5€"})]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"a": 1', "line 2: not JSON (Expecting ',' delimiter at character 8)"),
        (b"\xff{}\n", "line 2: not UTF-8 (invalid start byte at byte 0)"),
        (b"[1]\n", "line 2: expected a JSON object, got list"),
        (b'{"a": NaN}\n', "line 2: not JSON that can be read (NaN is not a number)"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}\n', "line 2: not JSON that can be read (the key 'c' is given twice)"),
        (b'{"a": ' + b"9" * 5000 + b"}\n", "line 2: not JSON that can be read"),
        (b'{"a": ' + b"[" * 100_000 + b"\n", "line 2: not JSON that can be read"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, line, says):
    path = write(tmp_path / "p.jsonl", {"a": 1}, line)
    with pytest.raises(UserError) as caught:
        list(read_records(path))
    assert f"{path} {says}" in str(caught.value)


def test_values_nested_without_end_are_refused():
    value = "x"
    for _ in range(150):
        value = [value]
    with pytest.raises(UserError, match="nested more than 100 deep"):
        read_fields({"prompt": "a", "answer": "b", "more": value}, "p line 1", data())


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such prompt file"):
        list(read_records(tmp_path / "p.jsonl"))
    write(tmp_path / "p.csv", b"a,b\n")
    with pytest.raises(UserError, match=r"a prompt file ends in .jsonl, .ndjson, .parquet; got the ending '.csv'"):
        list(read_records(tmp_path / "p.csv"))
    write(tmp_path / "p.parquet", b"no parquet")
    with pytest.raises(UserError, match=r"p.parquet: not a whole Parquet file"):
        list(read_records(tmp_path / "p.parquet"))


def test_a_parquet_file_of_verl_reads_as_its_records(tmp_path):
    from datasets import Dataset

    other = {**VERL, "extra_info": {"split": "train", "index": 1, "note": "new"}}
    Dataset.from_list([VERL, other]).to_parquet(str(tmp_path / "p.parquet"))
    rows = [read_fields(row, where, data("verl")) for where, _, row in read_records(tmp_path / "p.parquet")]
    assert [row.question for row in rows] == [VERL["prompt"], VERL["prompt"]]
    assert [row.answer for row in rows] == ["72", "72"]
    assert rows[1].extra == {"split": "train", "index": 1, "note": "new"}


def test_a_row_of_a_parquet_file_is_named(tmp_path):
    from datasets import Dataset

    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "p.parquet"))
    with pytest.raises(UserError, match=r"p.parquet row 2: column answer is null"):
        [read_fields(row, where, data()) for where, _, row in read_records(tmp_path / "p.parquet")]
