"""Entry point of `burnish reap`: removes sandboxes that nobody will come back for, and touches nothing else.

A container is ours by the label `burnish=1`. It goes when its run is named, when its driver is known to be dead, or when its
lease is over. Local sandboxes carry the same labels in a file. Safe to repeat and to run beside living runs.
"""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from burnish.envs.config import ReapRun
from burnish.envs.sandbox.base import SandboxUnavailable
from burnish.envs.sandbox.lease import is_orphan
from burnish.envs.sandbox.local import base_directory, remove_tree
from burnish.envs.sandbox.processes import end_processes

NAMELESS_S = 3600.0
"""Age at which a local sandbox that does not say whose it is belongs to nobody."""


IsDue = Callable[[Mapping[str, str]], bool]
"""Whether the sandbox with these labels is to go."""


def rule_of(config: ReapRun, now: float) -> IsDue:
    """What `burnish reap` removes at the time `now`, seconds since the epoch."""

    def is_due(owner: Mapping[str, str]) -> bool:
        return owner.get("burnish.run") == config.run if config.run else is_orphan(owner, now)

    return is_due


def reap_attempts(engine_url: str, driver: str, run: str, attempts: Collection[str]) -> int:
    """Removes the sandboxes of these attempts of one driver, whose process died; returns how many there were."""

    def is_due(owner: Mapping[str, str]) -> bool:
        return (
            owner.get("burnish.attempt") in attempts
            and owner.get("burnish.run") == run
            and owner.get("burnish.driver") == driver
        )

    return sum(counts["removed"] for counts in (reap_local(is_due), *reached_containers(engine_url, is_due)))


def reap_driver(engine_url: str, driver: str) -> int:
    """Removes whatever a driver's processes have left open; returns how many there were."""

    def is_due(owner: Mapping[str, str]) -> bool:
        return owner.get("burnish.driver") == driver

    return sum(counts["removed"] for counts in (reap_local(is_due), *reached_containers(engine_url, is_due)))


def reached_containers(engine_url: str, is_due: IsDue) -> list[Counter[str]]:
    """One count, or none where no engine answers (and so nothing can be left of it)."""
    try:
        return [reap_containers(engine_url, is_due)]
    except SandboxUnavailable:
        return []


def reap_containers(engine_url: str, is_due: IsDue) -> Counter[str]:
    """Counts of `removed`, `kept` (a living driver's) and `failed` containers.

    Raises:
        SandboxUnavailable: no engine answers.
    """
    # the engine's library is needed here only
    import docker.errors

    from burnish.envs.sandbox.container import engine_errors, remove
    from burnish.envs.sandbox.docker import connect

    client = connect(engine_url, 60.0)
    counts: Counter[str] = Counter()
    with engine_errors("the list of containers"):
        found = client.containers(all=True, filters={"label": "burnish=1"})
    for container in found:
        if not is_due(container.get("Labels") or {}):
            counts["kept"] += 1
            continue
        with contextlib.suppress(docker.errors.NotFound):
            counts["removed" if remove(client, container["Id"]) else "failed"] += 1
    client.close()
    return counts


def reap_local(is_due: IsDue, *, is_nameless_due: bool = False) -> Counter[str]:
    """The same for the folders and processes of local sandboxes.

    Args:
        is_nameless_due: old ones that do not say whose they are go too.
    """
    counts: Counter[str] = Counter()
    now = time.time()
    for home in sorted(base_directory().glob("*")):
        try:
            lines = (home / "owner").read_text("utf-8").splitlines()
        except OSError:
            # killed while it was made or removed; a young one is being made or removed by somebody alive
            with contextlib.suppress(OSError):
                if is_nameless_due and now - home.stat().st_mtime > NAMELESS_S:
                    end_processes(home.name)
                    remove_tree(home)
                    counts["removed"] += 1
            continue
        owner = dict(line.split("=", 1) for line in lines if "=" in line)
        if is_due(owner):
            end_processes(home.name)
            remove_tree(home)
            counts["removed"] += 1
        else:
            counts["kept"] += 1
    return counts


def main(config: ReapRun) -> int:
    """Prints what was removed; 1 when the engine refused to remove something.

    Raises:
        SandboxUnavailable: an engine was named, and it does not answer.
    """
    is_due = rule_of(config, time.time())
    local = reap_local(is_due, is_nameless_due=not config.run)
    try:
        containers = reap_containers(config.engine_url, is_due)
    except SandboxUnavailable:
        if config.engine_url:
            raise
        containers = None
    shown = "no Docker engine answers" if containers is None else sentence(containers, "container")
    sys.stdout.write(f"{shown}; {sentence(local, 'local sandbox')}\n")
    return 1 if containers is not None and containers["failed"] else 0


def sentence(counts: Counter[str], noun: str) -> str:
    plural = {"container": "containers", "local sandbox": "local sandboxes"}[noun]
    parts = [f"{counts['removed']} {noun if counts['removed'] == 1 else plural} removed", f"{counts['kept']} kept"]
    return ", ".join(parts + [f"{counts['failed']} failed"] * bool(counts["failed"]))
