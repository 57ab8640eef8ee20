"""Conversations from a file to token ids with a loss mask, strictly: every complaint names the file and the line.

JSON is parsed here, line by line: a columnar loader would unify the objects of all lines and fill every tool call with
other tools' arguments as nulls. `datasets` holds the rendered result. Nothing is cut or dropped without being counted.
"""

import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.policy.encoding.config import EncodingConfig
from burnish.policy.encoding.messages import function_schemas, messages_from_openai
from burnish.policy.encoding.render import Rendered, render, with_tools
from burnish.policy.encoding.tokenizer import EncodingError, Tokenizer
from burnish.policy.training.config import BatchConfig
from burnish.policy.training.packing import PackedBatch, Sample, batch_of, pack
from burnish.sft.config import DataConfig, DataFormat, OnOverflow

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

FIELDS: dict[DataFormat, tuple[set[str], set[str]]] = {
    # required, allowed beside them
    DataFormat.chat: ({"messages"}, {"tools"}),
    DataFormat.transcript: (
        {"messages", "task_id"},
        {"domain", "family", "difficulty", "split", "reward", "turns", "tools"},
    ),
}
# what only one kind of message can carry: elsewhere it would be dropped without a word
ONLY_IN: dict[str, tuple[str, ...]] = {
    "reasoning": ("assistant",),
    "reasoning_content": ("assistant",),
    "tool_calls": ("assistant",),
    "tool_call_id": ("tool",),
    "tools": ("system", "developer"),
}
MESSAGE_FIELDS = {"role", "content", "name", "tools", "reasoning", "reasoning_content", "tool_calls", "tool_call_id"}


class DataError(ValueError):
    """A record of the data file that cannot be trained on; names file, line and what was expected."""


@dataclass(kw_only=True)
class Counts:
    """What became of a file's conversations."""

    conversations: int = 0
    tokens: int = 0
    """Kept."""
    loss_tokens: int = 0
    """Kept and trained on."""
    dropped: int = 0
    """Conversations left out as too long."""
    truncated: int = 0
    """Conversations cut."""
    lost_tokens: int = 0
    """Tokens of what was dropped or cut."""


def load(path: Path, config: DataConfig, tokenizer: Tokenizer, encoding: EncodingConfig) -> tuple["Dataset", Counts]:
    """Read and render a whole file.

    Returns:
        A data set with the columns line, ids and loss_mask, in the file's order, and what was kept.

    Raises:
        DataError: the first record that is not what the format says.
        FileNotFoundError: no such file.
    """
    from datasets import Dataset

    counts = Counts()
    columns: dict[str, list[Any]] = {"line": [], "ids": [], "loss_mask": []}
    for line, record in read_records(path):
        where = f"{path} line {line}"
        rendered = _rendered(record, where, config, tokenizer, encoding)
        kept = fit(rendered, where, config, counts)
        if kept is not None:
            columns["line"].append(line)
            columns["ids"].append(kept.ids)
            columns["loss_mask"].append(kept.loss_mask)
    counts.conversations = len(columns["ids"])
    counts.tokens = sum(map(len, columns["ids"]))
    counts.loss_tokens = sum(map(sum, columns["loss_mask"]))
    if not counts.conversations:
        raise DataError(f"{path} holds no conversation to train on ({counts.dropped} were dropped as too long)")
    logger.info("Data %s: %s", path, counts)
    return Dataset.from_dict(columns), counts


def load_all(
    paths: Sequence[str], config: DataConfig, tokenizer: Tokenizer, encoding: EncodingConfig, *, limit: int = 0
) -> tuple["Dataset", Counts]:
    """Several files one after the other; see `load`.

    Args:
        limit: first conversations of each file only; 0 takes all.

    Raises:
        DataError: also where a file holds fewer than `limit`.
    """
    from datasets import concatenate_datasets

    loaded = [(path, *load(Path(path), config, tokenizer, encoding)) for path in paths]
    for path, dataset, _ in loaded:
        if limit > len(dataset):
            raise DataError(f"{path} holds {len(dataset)} conversations, {limit} are asked for")
    total = Counts(**{f.name: sum(getattr(counts, f.name) for *_, counts in loaded) for f in fields(Counts)})
    return concatenate_datasets([dataset.select(range(limit or len(dataset))) for _, dataset, _ in loaded]), total


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line or row number from 1, record) of a .jsonl or .parquet file; blank lines are skipped.

    Raises:
        DataError: a line that is not UTF-8, not JSON or not an object; another kind of file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no data file at {path}")
    if path.suffix == ".parquet":
        yield from _parquet_records(path)
    elif path.suffix in (".jsonl", ".ndjson"):
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield number, _parsed(raw, f"{path} line {number}")
    else:
        raise DataError(f"{path}: expected a .jsonl or .parquet file, got the ending {path.suffix!r}")


def _parsed(raw: bytes | str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(raw if isinstance(raw, str) else raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not JSON ({error.msg} at column {error.colno}); expected one object a line"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of brackets
        raise DataError(f"{where}: not JSON that can be read ({error}); mend or remove the line") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return record


def _parquet_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows whose text columns `messages` and `tools` hold JSON are parsed; structs are taken without their nulls."""
    from datasets import Dataset
    from datasets.exceptions import DatasetsError

    try:
        rows = Dataset.from_parquet(str(path), keep_in_memory=True)
    except (DatasetsError, ValueError, OSError) as error:
        raise DataError(f"{path}: not a whole parquet file ({error.__cause__ or error})") from error
    for number, row in enumerate(rows, start=1):
        assert isinstance(row, dict)
        where = f"{path} row {number}"
        for name in ("messages", "tools"):
            if isinstance(row.get(name), str):
                row[name] = _parsed(f'{{"{name}": {row[name]}}}', f"{where} column {name}")[name]
            elif name in row:
                _refuse_merged_arguments(row[name], where)
        # a column of another record's format is null here: absent
        yield number, {name: value for name, value in row.items() if value is not None}


def _refuse_merged_arguments(messages: Any, where: str) -> None:
    for message in messages if isinstance(messages, list) else []:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") or call if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
                raise DataError(
                    f"{where}: tool arguments are stored as columns, so other tools' keys are mixed in as nulls; "
                    f"store `arguments` (or the whole `messages`) as JSON text"
                )


def _rendered(
    record: Mapping[str, Any], where: str, config: DataConfig, tokenizer: Tokenizer, encoding: EncodingConfig
) -> Rendered:
    kind = config.format
    if kind is DataFormat.auto:
        kind = DataFormat.transcript if "task_id" in record else DataFormat.chat
    _check_fields(record, where, kind)
    try:
        messages = messages_from_openai(record["messages"])
        tools = function_schemas(record.get("tools"), "tools")
        rendered = render(with_tools(messages, tools), tokenizer, encoding)
    except EncodingError as error:
        raise DataError(f"{where}: {error}") from None
    except RecursionError:
        raise DataError(f"{where}: objects or lists are nested too deeply; mend or remove the line") from None
    _check_terminators(rendered, where, tokenizer.special.eos)
    return rendered


def _check_fields(record: Mapping[str, Any], where: str, kind: DataFormat) -> None:
    required, optional = FIELDS[kind]
    if missing := sorted(required - record.keys()):
        raise DataError(f"{where}: field '{missing[0]}' is missing; format {kind} needs {', '.join(sorted(required))}")
    if unknown := sorted(record.keys() - required - optional):
        known = ", ".join(sorted(required | optional))
        raise DataError(f"{where}: unknown field '{unknown[0]}'; format {kind} knows {known}")
    messages = record["messages"]
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"{where}: 'messages' must be a list of at least one message")
    for index, message in enumerate(messages):
        if isinstance(message, Mapping):
            _check_message(message, f"messages[{index}]", where)


def _check_message(message: Mapping[str, Any], name: str, where: str) -> None:
    given = {field for field, value in message.items() if value is not None}
    if unknown := sorted(given - MESSAGE_FIELDS):
        known = ", ".join(sorted(MESSAGE_FIELDS))
        raise DataError(f"{where}: unknown field '{name}.{unknown[0]}'; a message knows {known}")
    role = message.get("role")
    for field, roles in ONLY_IN.items():
        if message.get(field) and role not in roles:
            raise DataError(f"{where}: {name}.{field} belongs to a message of {' or '.join(roles)}, not of {role}")
    if role in ("user", "system", "developer") and message.get("content") is None and not message.get("tools"):
        raise DataError(f"{where}: {name}.content is null or missing; a {role} message needs text")
    spoken = ("content", "reasoning", "reasoning_content", "tool_calls")
    if role == "assistant" and not any(message.get(field) for field in spoken):
        raise DataError(f"{where}: {name} says nothing: its content is empty and it has no tool_calls; remove it")


def _check_terminators(rendered: Rendered, where: str, eos: int) -> None:
    """Every trained stretch must end with a trained EOS: a policy that never sees it never stops."""
    mask = rendered.loss_mask
    if not any(mask):
        raise DataError(f"{where}: no assistant message, so nothing to train on")
    for place, is_trained in enumerate(mask):
        is_end = is_trained and (place + 1 == len(mask) or not mask[place + 1])
        if is_end and rendered.ids[place] != eos:
            raise DataError(f"{where}: an assistant turn ends at token {place} without a trained end of sentence")


def fit(rendered: Rendered, where: str, config: DataConfig, counts: Counts) -> Rendered | None:
    """Apply the overflow policy; None when the conversation is left out."""
    extra = len(rendered.ids) - config.max_tokens
    if extra <= 0:
        return rendered
    if config.on_overflow is OnOverflow.error:
        raise DataError(
            f"{where}: {len(rendered.ids)} tokens, more than data.max_tokens={config.max_tokens}; raise it, or choose "
            f"data.on_overflow=drop or truncate"
        )
    if config.on_overflow is OnOverflow.truncate and any(rendered.loss_mask[: config.max_tokens]):
        counts.truncated += 1
        counts.lost_tokens += extra
        return Rendered(rendered.ids[: config.max_tokens], rendered.loss_mask[: config.max_tokens])
    counts.dropped += 1
    counts.lost_tokens += len(rendered.ids)
    return None


@dataclass(frozen=True, kw_only=True)
class Order:
    """Which conversations make which batch: a function of the seed, so that a cursor is all there is to restore."""

    num_conversations: int
    batch_size: int
    seed: int

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_conversations // self.batch_size)

    def batch(self, cursor: int) -> list[int]:
        """Conversations of the batch with this index, counted over all epochs; an epoch's last one may be smaller."""
        epoch, place = divmod(cursor, self.batches_per_epoch)
        shuffled = list(range(self.num_conversations))
        random.Random(f"{self.seed}/{epoch}").shuffle(shuffled)
        return shuffled[place * self.batch_size : (place + 1) * self.batch_size]


def micro_batches(dataset: "Dataset", indices: Sequence[int], config: BatchConfig) -> list[PackedBatch]:
    """Conversations as micro-batches of one rank."""
    rows: Any = dataset.select(indices)
    samples = [Sample(ids=row["ids"], loss_mask=row["loss_mask"], rollout=n) for n, row in enumerate(rows)]
    return cut(samples, config)


def cut(samples: Sequence[Sample], config: BatchConfig) -> list[PackedBatch]:
    """Samples as micro-batches: packed, or so many at a time."""
    if not config.micro_batch_size:
        return pack(samples, config.tokens_per_micro_batch)
    size = config.micro_batch_size
    return [batch_of(samples[start : start + size]) for start in range(0, len(samples), size)]


def loss_tokens(batches: Sequence[PackedBatch]) -> int:
    """The share of these micro-batches in the denominator."""
    return sum(int(batch.loss_mask.sum()) for batch in batches)
