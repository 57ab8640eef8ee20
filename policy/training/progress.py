"""How far a run is: a bar on a terminal, a plain line now and then when piped."""

import logging
import sys
import time
from typing import Any, Self

logger = logging.getLogger(__name__)

LINE_EVERY_S = 10.0


class Progress:
    """Counts steps of one stage. Use it as a context manager.

    Args:
        title: what is counted, such as "sft".
        total: steps until done.
        done: steps that an earlier process already did.
    """

    def __init__(self, title: str, total: int, *, done: int = 0) -> None:
        self.title, self.total, self.done = title, total, done
        self._start = self._last_line = time.monotonic()
        self._done_before = done
        self._bar: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(desc=self.title, total=self.total, initial=self.done, file=sys.stderr, dynamic_ncols=True)
        return self

    def __exit__(self, *reason: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, steps: int = 1, **values: float) -> None:
        """Count `steps` more; `values` are shown beside the count."""
        self.done += steps
        shown = {name: f"{value:.4g}" for name, value in values.items()}
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(steps)
            return
        now = time.monotonic()
        if now - self._last_line < LINE_EVERY_S and self.done < self.total:
            return
        self._last_line = now
        rate = (self.done - self._done_before) / max(now - self._start, 1e-9)
        left = f", {(self.total - self.done) / rate:.0f} s left" if rate and self.done < self.total else ""
        detail = "".join(f", {name} {value}" for name, value in shown.items())
        logger.info("%s %d/%d%s%s", self.title, self.done, self.total, detail, left)
