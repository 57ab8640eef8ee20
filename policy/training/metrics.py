"""Numbers of a run: metrics.jsonl is the record, W&B a copy of it. Neither may block or end the training.

A line of metrics.jsonl is one JSON object: `step` (of its area), `policy_version`, `time` (unix seconds), `area/name`
values, and `crc` (CRC-32 of the line without it). It is appended in one write. A torn last line is dropped on opening.
After a resume from step k, lines with a later step are superseded: they stay, a line {"resumed_from": k} says so, and
`read_metrics` leaves them out. In W&B, which cannot take a point back, the value logged last wins.

Each area has its own step axis (`train/step`, `eval/step`, ...): a run-wide step would drop every area that is behind.
"""

import errno
import json
import logging
import math
import os
import queue
import threading
import time
import zlib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

logger = logging.getLogger(__name__)

FILE = "metrics.jsonl"
QUEUE_LEN = 10_000
CLOSE_TIMEOUT_S = 30.0
STOPPED = "W&B has stopped; training goes on and metrics.jsonl stays complete"


class WandbMode(StrEnum):
    """Where the W&B copy goes; `auto` is online only when WANDB_API_KEY is set. WANDB_MODE in the environment wins."""

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


class MetricsError(ValueError):
    """metrics.jsonl holds a damaged line; names file and line."""


class MetricLogger:
    """Writes the numbers of one process. One writer a run directory.

    Args:
        run_dir: holds metrics.jsonl and the W&B files.
        project: W&B project.
        mode: see WandbMode.
        config: resolved configuration, shown in W&B.
        resumed_from: step of the training state that the run goes on from; None for a new run.
    """

    def __init__(
        self,
        run_dir: Path,
        project: str = "burnish",
        mode: WandbMode = WandbMode.auto,
        *,
        config: Mapping[str, Any] | None = None,
        resumed_from: int | None = None,
    ) -> None:
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / FILE
        _drop_torn_line(self.path)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._warned: set[str] = set()
        self._wandb = _WandbThread(run_dir, project, resolve_mode(mode), config) if _is_on(mode) else None
        if resumed_from is not None and self.path.stat().st_size:
            self._append({"resumed_from": resumed_from, "time": time.time()})

    def log(self, values: Mapping[str, float], *, step: int, policy_version: int | None = None) -> None:
        """Record `area/name` values of one step of their area.

        Args:
            values: finite or not; NaN and infinities are kept as null in the file.
            step: counts per area, such as the optimizer step for train/ and the policy version for eval/.
            policy_version: of the policy that the values measure.
        """
        wrong = [name for name in values if name.count("/") < 1]
        if wrong:
            raise ValueError(f"metric {wrong[0]!r} has no area: name it area/name")
        record = {"step": step, "policy_version": policy_version, "time": round(time.time(), 3)}
        self._append(record | {name: _plain(value) for name, value in values.items()})
        if self._wandb is not None and not self._wandb.put(dict(values), step, policy_version):
            self._warn_once(STOPPED)

    def close(self) -> None:
        """Flush; waits a bounded time for W&B."""
        if self._wandb is not None and not self._wandb.is_alive:
            self._warn_once(STOPPED)
        elif self._wandb is not None and not self._wandb.finish(CLOSE_TIMEOUT_S):
            self._warn_once(f"W&B did not finish within {CLOSE_TIMEOUT_S:.0f} s; its copy may lack the last points")
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def _append(self, record: dict[str, Any]) -> None:
        line = _sealed(record)
        size = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) < len(line):
                # half a line would be damage once another follows it
                os.ftruncate(self._file, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # a full disk must not end the training
            self._warn_once(f"cannot write {self.path}: {error}")

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            logger.warning(sentence)


class _WandbThread:
    """Feeds W&B from a queue: a slow or dead tracker costs points there, never time here."""

    def __init__(self, run_dir: Path, project: str, mode: WandbMode, config: Mapping[str, Any] | None) -> None:
        self._queue: queue.Queue[dict[str, float] | None] = queue.Queue(QUEUE_LEN)
        self._thread = threading.Thread(
            target=self._run, args=(run_dir, project, mode, dict(config or {})), name="wandb", daemon=True
        )
        self._thread.start()

    def put(self, values: dict[str, float], step: int, policy_version: int | None) -> bool:
        """False when the point could not be handed over."""
        point = values | {f"{area}/step": step for area in {name.split("/")[0] for name in values}}
        if policy_version is not None:
            point["policy_version"] = policy_version
        if not self.is_alive:
            return False
        try:
            self._queue.put_nowait(point)
        except queue.Full:
            return False
        return True

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def finish(self, timeout_s: float) -> bool:
        """False when W&B has not taken everything within the time."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, run_dir: Path, project: str, mode: WandbMode, config: dict[str, Any]) -> None:
        # imported here: half a second that only a run with W&B pays, off the training thread
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        run = wandb.init(
            project=project,
            dir=str(run_dir),
            mode=mode.value,  # pyright: ignore[reportArgumentType]  never auto here
            name=run_dir.name,
            id=_run_id(run_dir),
            resume="allow" if mode is WandbMode.online else None,
            config=config,
            allow_val_change=True,
        )
        areas: set[str] = set()
        while (point := self._queue.get()) is not None:
            for area in {name.split("/")[0] for name in point if "/" in name} - areas:
                areas.add(area)
                run.define_metric(f"{area}/step", hidden=True)
                run.define_metric(f"{area}/*", step_metric=f"{area}/step")
            run.log(point)
        run.finish()


def resolve_mode(mode: WandbMode) -> WandbMode:
    """What `mode` means here and now."""
    asked = os.environ.get("WANDB_MODE", "")
    if mode is WandbMode.auto and asked in WandbMode.__members__:
        return WandbMode[asked]
    if mode is WandbMode.auto:
        return WandbMode.online if os.environ.get("WANDB_API_KEY") else WandbMode.offline
    return mode


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl in order, without superseded ones, without `crc`.

    Raises:
        MetricsError: a damaged line, unless it is a torn last one.
    """
    records: list[dict[str, Any]] = []
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        record = _opened(line)
        if record is None:
            raise MetricsError(f"{path} line {number} is damaged (checksum differs)")
        resumed_from = record.get("resumed_from")
        if resumed_from is None:
            records.append(record)
        else:
            records = [r for r in records if r["step"] <= resumed_from]
    return records


def _is_on(mode: WandbMode) -> bool:
    return resolve_mode(mode) is not WandbMode.disabled


def _run_id(run_dir: Path) -> str:
    """One id a run directory, so that a resumed process continues the same W&B run."""
    path = run_dir / "wandb-id"
    if not path.is_file():
        path.write_text(f"{zlib.crc32(f'{run_dir.resolve()} {time.time_ns()}'.encode()):08x}")
    return path.read_text()


def _plain(value: float) -> float | None:
    value = float(value)
    return value if math.isfinite(value) else None


def _sealed(record: dict[str, Any]) -> bytes:
    text = json.dumps(record)
    return f'{text[:-1]}, "crc": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def _opened(line: bytes) -> dict[str, Any] | None:
    body, comma, seal = line.rpartition(b', "crc": "')
    if not comma or seal != f'{zlib.crc32(body + b"}"):08x}"}}'.encode():
        return None
    return json.loads(body + b"}")


def _drop_torn_line(path: Path) -> None:
    """Cut what a kill in the middle of a write left after the last newline."""
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        logger.warning("Dropped a torn last line of %s", path)
        os.truncate(path, whole)
