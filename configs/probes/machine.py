"""Probes of the machine itself: GPU, cores, memory, disk, files, write access, clock."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from burnish.configs.config import DoctorRun
from burnish.configs.probes.finding import Finding, fail, ok, warn
from burnish.rollout.cluster import PlacementError, bundles_of, place
from burnish.rollout.config import ClusterConfig

GIB = 1 << 30
# the whole quickstart leaves less than half a GiB; below the first figure it may not end, below the second soon not
DISK_LEAST, DISK_ENOUGH = GIB, 5 * GIB
FILES_LEAST, FILES_ENOUGH = 20_000, 100_000
# Ray, trainer, generator, worker and the driver hold about 3 GiB at the quickstart's size, containers come on top
MEMORY_LEAST, MEMORY_ENOUGH = 3 * GIB, 6 * GIB
CGROUP_MEMORY = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
CLOCK_SLACK_S = 86_400.0
SKEW_S = 5.0


def gpu(run: DoctorRun) -> Finding:
    """What nvidia-smi lists. None is fine: the quickstart's policy is for the CPU."""
    if shutil.which("nvidia-smi") is None:
        return ok("none (no nvidia-smi): the presets tiny and small train on the CPU")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=run.timeout_s, check=False)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not lines:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        return warn(f"nvidia-smi lists none, it says: {said[-1]}", "check the driver; runs use the CPU meanwhile")
    return ok("; ".join(lines))


def cores(run: DoctorRun) -> Finding:
    """As many as the actors of an RL run declare."""
    count, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    there = f"{count} cores" if usable == count else f"{usable} of {count} cores may be used"
    there += f", load {os.getloadavg()[0]:.1f}"
    try:
        place(bundles_of(ClusterConfig()), {"this machine": {"CPU": float(count)}})
    except PlacementError:
        return fail(
            there,
            "RL declares 2 cores: give cluster.num_cpus=2 (quickstart: rl.cluster.num_cpus=2), it only takes longer",
        )
    if usable < 2:
        return warn(there, "figures in README.md are for two cores: expect twice the time")
    return ok(there)


def memory(run: DoctorRun) -> Finding:
    """What is available, within the limit of the container that this may run in."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    table = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
    total, free = table["MemTotal"], table["MemAvailable"]
    for path in CGROUP_MEMORY:
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            total, free = min(total, int(text)), min(free, int(text))
    return by_amount(
        free,
        MEMORY_LEAST,
        MEMORY_ENOUGH,
        f"{free / GIB:.1f} of {total / GIB:.1f} GiB available",
        f"the quickstart wants {MEMORY_ENOUGH // GIB} GiB: end other programs, or lower eval.concurrency and "
        "rl.cluster.episodes_per_worker",
    )


def by_amount(amount: float, least: float, enough: float, there: str, todo: str) -> Finding:
    make: Callable[[str, str], Finding] = fail if amount < least else warn
    return ok(there) if amount >= enough else make(there, todo)


def existing(path: Path) -> Path:
    """The path itself, or the nearest one above it that is there."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def places(run: DoctorRun) -> dict[str, Path]:
    """Name -> folder that runs write into, one a file system."""
    named = {
        run.runs: existing(Path(run.runs)),
        tempfile.gettempdir(): existing(Path(tempfile.gettempdir())),
        "/var/lib/docker": Path("/var/lib/docker"),
    }
    found: dict[int, tuple[str, Path]] = {}
    for name, path in named.items():
        if path.exists():
            found.setdefault(path.stat().st_dev, (name, path))
    return dict(found.values())


def disk(run: DoctorRun) -> Finding:
    """Space where runs, temporary files and containers are kept."""
    free = {name: shutil.disk_usage(path).free for name, path in places(run).items()}
    there = ", ".join(f"{amount / GIB:.1f} GiB free for {name}" for name, amount in free.items())
    todo = (
        f"free some space ({DISK_ENOUGH // GIB} GiB are plenty): remove old folders below {run.runs}, or give runs=DIR"
    )
    return by_amount(min(free.values()), DISK_LEAST, DISK_ENOUGH, there, todo)


def inodes(run: DoctorRun) -> Finding:
    """Files that may still be made; some file systems do not count."""
    counted = {n: s.f_favail for n, p in places(run).items() if (s := os.statvfs(p)).f_files}
    if not counted:
        return ok("not counted by this file system")
    there = ", ".join(f"{count:,} more files for {name}" for name, count in counted.items())
    todo = f"a task set and a run are thousands of small files: remove old folders below {run.runs}"
    return by_amount(min(counted.values()), FILES_LEAST, FILES_ENOUGH, there, todo)


def runs(run: DoctorRun) -> Finding:
    """A file can be made there, and read back; it is removed again."""
    folder = existing(Path(run.runs))
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            file.write(b"here")
            file.flush()
            if Path(file.name).read_bytes() != b"here":
                return fail(f"{folder} does not give back what was written", "give runs=DIR on another disk")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return fail(f"{folder}: {reason}", "give runs=DIR in a place that this user may write")
    there = f"{run.runs} can be written"
    return ok(there if folder == Path(run.runs).absolute() else f"{there} (it will be made in {folder})")


def clock(run: DoctorRun) -> Finding:
    """Not before the code was written, even, and the same as the engine's: leases and ages are differences of times."""
    now = time.time()
    written = Path(__file__).stat().st_mtime
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    todo = "set the clock (NTP): leases of containers are times, a wrong clock ends them early or never"
    if now < written - CLOCK_SLACK_S:
        return warn(f"{shown}, which is before this code was written", todo)
    skew = engine_skew(run)
    if skew is None:
        return ok(shown)
    if abs(skew) > SKEW_S:
        return warn(f"{shown}, the Docker engine's differs by {skew:+.0f} s", todo)
    return ok(f"{shown}, the Docker engine's agrees")


def engine_skew(run: DoctorRun) -> float | None:
    """Seconds that the engine's clock is ahead; None where none answers."""
    from burnish.configs.probes.engine import reached
    from burnish.rollout.container_events import engine_time

    client = reached(run)
    if client is None:
        return None
    try:
        asked = time.time()
        there = engine_time(client)
        return there - (asked + time.time()) / 2
    finally:
        client.close()
