"""A JSON object from a file; a damaged file is an error that names it, with the line where there is one."""

import json
from pathlib import Path
from typing import Any


class JsonFileError(ValueError):
    """A file that should hold a JSON object and does not."""


def read_object(path: Path, *keys: str, advice: str = "") -> dict[str, Any]:
    """The object in a file.

    Args:
        keys: must be there.
        advice: what to do about a damaged file, for the message.

    Raises:
        FileNotFoundError: no such file.
        JsonFileError: not UTF-8, not JSON, not an object, or a key is missing.
    """
    ending = f"; {advice}" if advice else ""
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise JsonFileError(f"{path}: not UTF-8 (byte {error.start}){ending}") from None
    except json.JSONDecodeError as error:
        raise JsonFileError(f"{path}: not JSON (line {error.lineno}: {error.msg}){ending}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of brackets
        raise JsonFileError(f"{path}: not JSON that can be read ({error}){ending}") from None
    if not isinstance(content, dict):
        raise JsonFileError(f"{path}: expected an object of keys and values, got {type(content).__name__}{ending}")
    for key in keys:
        if key not in content:
            raise JsonFileError(f"{path}: {key!r} is missing{ending}")
    return content
