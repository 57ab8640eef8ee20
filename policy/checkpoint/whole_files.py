"""Files that are there whole or not at all, whenever their writer is killed. Torch-free."""

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step; its content is on the disk before it has its name. One writer at a time."""
    staged = path.with_name(f".{path.name}.writing")
    with staged.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """`write_text` of an object, for people too: a key a line."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
