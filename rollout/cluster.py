"""The Ray cluster of a run: started small and local, checked for room before an actor asks, swept after a dead driver.

Every process below a driver inherits BURNISH_OWNER, the driver's identity (envs/sandbox/lease.py). Ray's workers end with the driver's
raylet, but some of its agents live on after a kill -9: whatever carries the mark of a driver that no longer exists is
killed at the next start. Knows no actor and no algorithm.
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from burnish.envs.errors import UserError
from burnish.envs.sandbox.lease import driver_identity, is_alive
from burnish.rollout.config import ClusterConfig

logger = logging.getLogger(__name__)

OWNER = "BURNISH_OWNER"
PROC = Path("/proc")
SHORT_TMP, FOLDER = Path("/tmp"), "burnish-ray-"
"""Where a local cluster keeps its files and sockets."""


class PlacementError(UserError):
    """The cluster lacks what the run's actors need: names the node, what is needed and what is free."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Actors that are placed together on one node."""

    name: str
    num_cpus: float
    count: int = 1
    num_gpus: float = 0.0


def place(bundles: Sequence[Bundle], free: Mapping[str, Mapping[str, float]]) -> dict[str, list[str]]:
    """Assigns each bundle's actors to nodes, or says at once what is short. A cluster-wide sum proves nothing.

    Args:
        bundles: each with all its `count` actors on one node.
        free: node -> {"CPU": logical CPUs, "GPU": devices} not yet taken.

    Returns:
        node -> names of the bundles on it.

    Raises:
        PlacementError: a bundle fits on no node.
    """
    left = {node: {"CPU": room.get("CPU", 0.0), "GPU": room.get("GPU", 0.0)} for node, room in free.items()}
    placed: dict[str, list[str]] = {node: [] for node in left}
    for bundle in sorted(bundles, key=lambda b: (-b.num_gpus * b.count, -b.num_cpus * b.count)):
        need = {"CPU": bundle.num_cpus * bundle.count, "GPU": bundle.num_gpus * bundle.count}
        # fullest node that still has room: large holes are kept for large bundles
        fits = [n for n, room in left.items() if all(room[kind] >= need[kind] - 1e-6 for kind in need)]
        if not fits:
            shortages = [
                f"{node} has {room[kind]:g} {kind} free of the {need[kind]:g} needed"
                for node, room in sorted(left.items())
                for kind in need
                if room[kind] < need[kind] - 1e-6
            ]
            raise PlacementError(
                f"no node has room for {bundle.name} ({bundle.count} x {bundle.num_cpus:g} CPU"
                f"{f' + {bundle.num_gpus:g} GPU' if bundle.num_gpus else ''} on one node): {'; '.join(shortages)}. "
                f"Set cluster.num_cpus higher to share cores, or lower the cluster.cpus_per_* keys"
            )
        node = min(fits, key=lambda n: (left[n]["CPU"], n))
        placed[node].append(bundle.name)
        for kind, amount in need.items():
            left[node][kind] -= amount
    return placed


def bundles_of(config: ClusterConfig) -> list[Bundle]:
    """What a run places."""
    return [
        Bundle(name="trainer", num_cpus=config.cpus_per_trainer),
        *(Bundle(name=f"generator-{i}", num_cpus=config.cpus_per_generator) for i in range(config.num_generators)),
        *(Bundle(name=f"worker-{i}", num_cpus=config.cpus_per_worker) for i in range(config.num_workers)),
    ]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A started or joined cluster."""

    folder: Path | None
    """Ray's files of a local cluster; None for a joined one."""

    def stop(self) -> None:
        """Ends the local cluster (or leaves the joined one) and removes its files."""
        import ray

        ray.shutdown()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def start(config: ClusterConfig) -> Cluster:
    """Starts a local cluster, or joins the configured one, once the run is known to fit into it.

    Raises:
        PlacementError: not enough room on some node; nothing is left running.
    """
    sweep_orphans()
    os.environ[OWNER] = driver_identity()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # escape sequences are for terminals
    os.environ.setdefault("RAY_COLOR_PREFIX", "1" if sys.stderr.isatty() else "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    began = time.monotonic()
    if config.address:
        import ray

        ray.init(address=config.address, logging_level=logging.ERROR)
        try:
            place(bundles_of(config), {n["NodeManagerAddress"]: n["Resources"] for n in ray.nodes() if n["Alive"]})
        except PlacementError:
            ray.shutdown()
            raise
        return Cluster(folder=None)
    num_cpus = config.num_cpus or os.cpu_count() or 1
    # before Ray is even imported: a shortage costs no start-up
    place(bundles_of(config), {"this machine": {"CPU": float(num_cpus)}})
    import ray

    # the paths of Unix sockets are short: below a long TMPDIR they would not fit
    folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=SHORT_TMP))
    (folder / "owner").write_text(os.environ[OWNER])
    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=config.object_store_bytes,
        _temp_dir=str(folder),
        logging_level=logging.ERROR,
    )
    logger.info("Ray started with %d logical CPUs in %.1f s", num_cpus, time.monotonic() - began)
    return Cluster(folder=folder)


def sweep_orphans() -> list[int]:
    """Kills processes whose owner (a driver of an earlier run on this machine) is dead; returns their pids.

    Files of such a driver's cluster go too.
    """
    for mark in SHORT_TMP.glob(f"{FOLDER}*/owner"):
        if is_alive(mark.read_text()) is False:
            shutil.rmtree(mark.parent, ignore_errors=True)
    killed = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        owner = _owner_of(entry)
        if owner and is_alive(owner) is False:
            try:
                os.kill(int(entry.name), signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
            killed.append(int(entry.name))
    if killed:
        logger.info("Killed %d processes of dead runs: %s", len(killed), killed)
    return killed


def _owner_of(entry: Path) -> str:
    try:
        environment = (entry / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
    mark = f"{OWNER}=".encode()
    for variable in environment.split(b"\0"):
        if variable.startswith(mark):
            return variable[len(mark) :].decode(errors="replace")
    return ""
