"""The records of a prompt file, one after another, each with its place. Knows no column.

JSON is read strictly: a key given twice, NaN and half a line are mistakes of the file, not values.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from burnish.envs.errors import UserError

ENDINGS = (".jsonl", ".ndjson", ".parquet")
MAX_DEPTH = 100


class PromptError(UserError):
    """A prompt file is not what it should be; names file, line or row, and column."""


def read_records(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(place for messages, line or row number from 1, record); blank lines are skipped.

    Raises:
        PromptError: no such file, another kind of file, or a record that is no object.
    """
    if not path.is_file():
        raise PromptError(f"{path}: no such prompt file")
    if path.suffix == ".parquet":
        yield from _parquet_records(path)
    elif path.suffix in ENDINGS:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    where = f"{path} line {number}"
                    yield where, number, _parsed(raw, where)
    else:
        raise PromptError(f"{path}: a prompt file ends in {', '.join(ENDINGS)}; got the ending {path.suffix!r}")


def _parsed(raw: bytes, where: str) -> dict[str, Any]:
    def no_constant(word: str) -> float:
        raise ValueError(f"{word} is not a number")

    def no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is given twice")
        return table

    try:
        record = json.loads(raw.decode("utf-8-sig"), parse_constant=no_constant, object_pairs_hook=no_twice)
    except UnicodeDecodeError as error:
        raise PromptError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not JSON ({error.msg} at character {error.colno}); one object a line") from None
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where}: not JSON that can be read ({error})") from None
    if not isinstance(record, dict):
        raise PromptError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return record


def _parquet_records(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    from datasets import Dataset
    from datasets.exceptions import DatasetsError

    try:
        rows = Dataset.from_parquet(str(path), keep_in_memory=True)
    except (DatasetsError, ValueError, OSError) as error:
        raise PromptError(f"{path}: not a whole Parquet file ({error.__cause__ or error})") from error
    for number, row in enumerate(rows, start=1):
        assert isinstance(row, dict)
        yield f"{path} row {number}", number, row


def check_json(value: Any, where: str, depth: int = 0) -> None:
    """Values go to the verifier's process and into a hash: only what JSON holds.

    Raises:
        PromptError: a date, bytes, an image, a number that is not finite; names its place.
    """
    if depth > MAX_DEPTH:
        raise PromptError(f"{where[:200]}: nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise PromptError(f"{where}: {value} is no number that can be compared; remove the row or the column")
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            check_json(inner, f"{where}.{name}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            check_json(inner, f"{where}[{index}]", depth + 1)
    else:
        raise PromptError(f"{where}: a {type(value).__name__} is no JSON value; store it as text or remove the column")
