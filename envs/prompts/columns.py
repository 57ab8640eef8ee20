"""From a record's columns to what a prompt is made of, strictly: what is missing or malformed is named with its place.

Null is absence: Parquet fills the fields that a record does not have with nulls.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from burnish.envs.prompts.config import PromptColumns, PromptData, PromptFormat
from burnish.envs.prompts.records import PromptError, check_json

OWN: dict[PromptFormat, PromptColumns] = {
    PromptFormat.plain: PromptColumns(prompt="prompt", answer="answer", data_source="data_source"),
    PromptFormat.verl: PromptColumns(
        prompt="prompt", answer="reward_model.ground_truth", data_source="data_source", extra="extra_info"
    ),
    PromptFormat.trl: PromptColumns(prompt="prompt", answer=None),
}
ROLES = ("system", "developer", "user", "assistant")
Question = str | list[dict[str, str]]
"""A prompt as its file has it: text, or chat messages."""


@dataclass(frozen=True, kw_only=True)
class Fields:
    """One record, read."""

    question: Question
    answer: Any
    """None where the set has no answers."""
    data_source: str
    extra: dict[str, Any]
    columns: dict[str, Any]
    """Every column but the prompt's, as it is."""


def columns_of(data: PromptData) -> PromptColumns:
    """The column names in force: those given, else the format's own."""
    own, given = OWN[data.format], data.columns
    names = {name: getattr(given, name) or getattr(own, name) for name in ("prompt", "data_source", "extra")}
    return replace(own, **names, answer=own.answer if given.answer == "" else given.answer)


def read_fields(record: Mapping[str, Any], where: str, data: PromptData) -> Fields:
    """Raises:
    PromptError: naming the place, the column and what to do.
    """
    names = columns_of(data)
    question = _question(value_at(record, names.prompt, where, "data.columns.prompt"), f"{where} column {names.prompt}")
    if data.format is PromptFormat.verl:
        _check_verl(record, question, where, names)
    answer = None
    if names.answer is not None:
        answer = value_at(record, names.answer, where, "data.columns.answer")
        check_json(answer, f"{where} column {names.answer}")
        if isinstance(answer, str) and not answer.strip():
            raise PromptError(f"{where}: column {names.answer} is empty; nothing could be compared with it")
    data_source = ""
    # a plain record may say it; verl's must, and so must one where a column was asked for
    is_optional = data.format is PromptFormat.plain and not data.columns.data_source
    if names.data_source and not (is_optional and record.get(names.data_source) is None):
        data_source = value_at(record, names.data_source, where, "data.columns.data_source")
        if not isinstance(data_source, str) or not data_source:
            raise PromptError(f"{where}: column {names.data_source} must be text, got {shown(data_source)}")
    root = root_of(record, names.prompt)
    columns = {name: value for name, value in record.items() if name != root}
    extra = _extra(record, columns, where, data, names)
    for name, value in columns.items():
        check_json(value, f"{where} column {name}")
    return Fields(question=question, answer=answer, data_source=data_source, extra=extra, columns=columns)


def value_at(record: Mapping[str, Any], name: str, where: str, key: str) -> Any:
    """The value of a column, which is not null.

    Raises:
        PromptError: it is missing or null; names the columns there are, and the key that says which one is meant.
    """
    node: Any = record
    parts = [name] if name in record else name.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, Mapping) or part not in node:
            parent = ".".join(parts[:depth]) or "the record"
            found = ", ".join(map(str, node)) if isinstance(node, Mapping) else f"no object but {shown(node)}"
            null = ", or null where there is none" if key.endswith("answer") else ""
            hint = "; is this data.format=verl?" if "reward_model" in record and name == "answer" else ""
            raise PromptError(
                f"{where}: column {name} is missing ({parent} has {found}); name the right one with {key}={null}{hint}"
            )
        node = node[part]
    if node is None:
        raise PromptError(f"{where}: column {name} is null; fill it in or remove the record")
    return node


def root_of(record: Mapping[str, Any], name: str) -> str:
    """The top column that a dotted name starts at."""
    return name if name in record else name.partition(".")[0]


def _question(value: Any, where: str) -> Question:
    if isinstance(value, str):
        _check_text(value, where)
        return value
    if not isinstance(value, list):
        raise PromptError(f"{where}: a prompt is text or a list of chat messages, got {shown(value)}")
    if not value:
        raise PromptError(f"{where}: an empty list of messages")
    messages = [_message(message, f"{where}[{index}]") for index, message in enumerate(value)]
    if messages[-1]["role"] != "user":
        raise PromptError(f"{where}: the last message is of {messages[-1]['role']}, so nobody asks; it must be of user")
    return messages


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise PromptError(f"{where}: a message is an object with role and content, got {shown(message)}")
    given = {name: value for name, value in message.items() if value is not None}
    if unknown := sorted(set(given) - {"role", "content"}):
        raise PromptError(f"{where}: field {unknown[0]} has no place in a prompt; a message has role and content")
    for name in ("role", "content"):
        if not isinstance(given.get(name), str):
            raise PromptError(f"{where}: field {name} must be text, got {shown(given.get(name))}")
    if given["role"] not in ROLES:
        raise PromptError(f"{where}: field role is {given['role']!r}; expected one of {', '.join(ROLES)}")
    _check_text(given["content"], f"{where} field content")
    return {"role": given["role"], "content": given["content"]}


def _check_text(text: str, where: str) -> None:
    if not text.strip():
        raise PromptError(f"{where}: empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(f"{where}: half a surrogate pair at character {error.start}, which is no text") from None


def _check_verl(record: Mapping[str, Any], question: Question, where: str, names: PromptColumns) -> None:
    if isinstance(question, str):
        raise PromptError(f"{where}: column {names.prompt} is text; in data.format=verl it is a list of chat messages")
    reward_model = record.get("reward_model")
    style = reward_model.get("style") if isinstance(reward_model, Mapping) else None
    if style == "model":
        raise PromptError(
            f"{where}: column reward_model.style is 'model': it asks for a reward model, which there is none of; "
            f"keep the records with style 'rule'"
        )


def _extra(
    record: Mapping[str, Any], columns: dict[str, Any], where: str, data: PromptData, names: PromptColumns
) -> dict[str, Any]:
    if not names.extra:
        named = {root_of(record, name) for name in (names.answer, names.data_source) if name}
        return {name: value for name, value in columns.items() if name not in named}
    # verl's own extra_info may be left out; a column that was asked for may not
    if not data.columns.extra and record.get(names.extra) is None:
        return {}
    extra = value_at(record, names.extra, where, "data.columns.extra")
    if not isinstance(extra, Mapping):
        raise PromptError(f"{where}: column {names.extra} must be an object, got {shown(extra)}")
    return dict(extra)


def shown(value: Any) -> str:
    """Type and, where it is short, the value."""
    kind = "null" if value is None else type(value).__name__
    text = repr(value)
    return kind if value is None or len(text) > 40 else f"{kind} {text}"
