"""Containers counted by the Docker engine: its own `create` events, written down while they happen.

The engine keeps only its last 256 events, so somebody has to listen all the time; after a gap (a restart of the engine or
of the listener) the kept ones are asked for again. Our counters have no part in it.
"""

import json
import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import docker.errors
import requests.exceptions

from burnish.envs.sandbox.base import SandboxUnavailable
from burnish.envs.sandbox.docker import connect

logger = logging.getLogger(__name__)

FILTERS = {"type": ["container"], "event": ["create"], "label": ["burnish=1"]}
RETRY_S = 1.0


class ContainerEvents:
    """Listens while the context is open. Without an engine it records nothing.

    Args:
        path: JSON lines, one an event, appended.
        engine_url: see SandboxConfig.engine_url.
    """

    def __init__(self, path: Path, engine_url: str = "") -> None:
        self.path, self.engine_url = path, engine_url
        self._seen = {event["id"] for event in read_events(path)}
        self._since = time.time()
        self._stop = threading.Event()
        self._stream: Any = None
        self._thread = threading.Thread(target=self._listen, name="container-events", daemon=True)

    def __enter__(self) -> Self:
        try:
            client = connect(self.engine_url, 10)
        except SandboxUnavailable:
            logger.info("No Docker engine answers: containers are not counted")
            return self
        # the engine's clock, not ours: nothing before this moment is ours to count
        self._since = float(int(engine_time(client)))
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        if not self._thread.is_alive():
            return
        time.sleep(RETRY_S)  # the engine publishes an event a moment after it answers the request
        self._stop.set()
        if self._stream is not None:
            self._stream.close()
        self._thread.join(10)

    def _listen(self) -> None:
        while not self._stop.is_set():
            try:
                self._follow()
            except (SandboxUnavailable, docker.errors.DockerException, requests.exceptions.RequestException, OSError):
                # closing the stream ends here too
                self._stop.wait(RETRY_S)

    def _follow(self) -> None:
        client = connect(self.engine_url, 3600)
        self._stream = client.events(since=int(self._since), filters=FILTERS, decode=True)
        with self.path.open("a") as file:
            for event in self._stream:
                self._since = max(self._since, event["timeNano"] / 1e9)
                if event["id"] not in self._seen:
                    self._seen.add(event["id"])
                    labels = {k: v for k, v in event["Actor"]["Attributes"].items() if k.startswith("burnish")}
                    file.write(json.dumps({"id": event["id"], "time": event["timeNano"], "labels": labels}) + "\n")
                    file.flush()


def read_events(path: Path) -> list[dict[str, Any]]:
    """What was recorded; half a last line, which a kill leaves, is ignored."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line.endswith("}")]


def count_containers(path: Path, drivers: Iterable[str]) -> int:
    """Containers that the given driver processes (`envs.sandbox.lease` identities) had made."""
    ours = set(drivers)
    return sum(event["labels"].get("burnish.driver") in ours for event in read_events(path))


def engine_time(client: Any) -> float:
    """Unix seconds on the engine's clock."""
    from datetime import datetime

    text = client.info()["SystemTime"]
    # nanoseconds: more digits than datetime reads
    head, _, tail = text.partition(".")
    zone = "+00:00" if tail.endswith("Z") else tail[-6:]
    return datetime.fromisoformat(f"{head}{zone}").timestamp()
