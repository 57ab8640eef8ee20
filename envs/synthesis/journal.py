"""An append-only JSONL file in which every line carries its checksum: what a killed run has finished, and no more.

A line that a crash cut off is dropped when the journal is opened again; a damaged line before the last is an error.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from burnish.envs.errors import UserError


def _checksum(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


class Journal:
    """Records in the order they were appended. One writer, which is held as long as it lives."""

    def __init__(self, path: Path) -> None:
        """Open or create it, and cut off an unfinished last line.

        Raises:
            UserError: another process is writing it, or a line is damaged.
        """
        self.path = path
        self.records: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        try:
            self._take()
        except BaseException:
            self._file.close()
            raise

    def _take(self) -> None:
        """Lock the file and read what is whole in it."""
        path = self.path
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path.parent} is being written by another process; wait for it or stop it") from None
        raw = path.read_bytes()
        good = 0
        for number, line in enumerate(raw.splitlines(keepends=True), start=1):
            record = self._parse(line)
            if record is None:
                if good + len(line) < len(raw):
                    raise UserError(f"{path}: line {number} is damaged; remove the directory and start again")
                break
            self.records.append(record)
            good += len(line)
        if good < len(raw):
            self._file.truncate(good)

    @staticmethod
    def _parse(line: bytes) -> dict[str, Any] | None:
        if not line.endswith(b"\n"):
            return None
        try:
            checksum, text = line.decode().rstrip("\n").split(" ", 1)
        except ValueError:
            return None
        return json.loads(text) if checksum == _checksum(text) else None

    def append(self, record: dict[str, Any]) -> None:
        """On disk when this returns."""
        text = json.dumps(record, sort_keys=True, ensure_ascii=True)
        self._file.write(f"{_checksum(text)} {text}\n".encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.records.append(record)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records)

    def close(self) -> None:
        self._file.close()
