"""How far a long count has come: a bar on a terminal, one line every tenth of the way when piped."""

import logging
import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)


class ProgressLine:
    """Use as a context manager; `advance` once for each thing done. Writes to stderr."""

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True))

    def __enter__(self) -> "ProgressLine":
        if self._bar:
            self._bar.start()
            self._bar_task = self._bar.add_task(self._title, total=self._total)
        return self

    def advance(self) -> None:
        before = self._done * 10 // self._total
        self._done += 1
        if self._bar:
            self._bar.advance(self._bar_task)
        elif self._done * 10 // self._total > before:
            logger.info("%s: %d of %d", self._title, self._done, self._total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
