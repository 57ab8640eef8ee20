"""Probes of the Docker engine: whether it answers, its base image, how it confines, a container that runs, left-overs."""

import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from burnish.configs.config import DoctorRun
from burnish.configs.probes.finding import Finding, Status, fail, ok, warn
from burnish.envs.config import SandboxConfig, SandboxKind
from burnish.envs.sandbox.base import SandboxUnavailable
from burnish.envs.sandbox.lease import is_alive, is_orphan
from burnish.envs.sandbox.local import base_directory
from burnish.rollout.cluster import FOLDER, SHORT_TMP

SOCKET = Path("/var/run/docker.sock")
OLDEST = 20
"""Major version of the engine of Debian 12, the oldest that was tried."""
SAMPLES = Path(__file__).parents[2] / "envs" / "tasks"
LOOK = "grep -hE '^(Seccomp|NoNewPrivs):' /proc/self/status; grep -cv '^Iface' /proc/net/route"
NOT_ASKED = "not looked at: sandbox=local"
NO_ENGINE = "not looked at: no engine answers"


def reached(run: DoctorRun) -> Any:
    """A client of the engine, to be closed; None where none answers or none is meant to be used."""
    from burnish.envs.sandbox.docker import connect

    if run.sandbox is SandboxKind.local:
        return None
    try:
        return connect(run.engine_url, run.timeout_s)
    except SandboxUnavailable:
        return None


def lacking(run: DoctorRun, there: str, todo: str) -> Finding:
    """A FAIL where the engine is a must, else a warning that says what happens instead."""
    if run.sandbox is SandboxKind.docker:
        return Finding(status=Status.fail, there=there, todo=todo)
    return warn(there, f"{todo}; until then sandbox=auto takes local subprocesses, which isolate nothing")


def unseen(run: DoctorRun) -> Finding:
    """What the probes after the first say where there is nothing to look at; the first one says what to do."""
    if run.sandbox is SandboxKind.local:
        return ok(NOT_ASKED)
    return Finding(status=Status.fail if run.sandbox is SandboxKind.docker else Status.warn, there=NO_ENGINE)


def engine(run: DoctorRun) -> Finding:
    """An engine answers, and is not older than what was tried."""
    client = reached(run)
    if client is None:
        return ok(NOT_ASKED) if run.sandbox is SandboxKind.local else lacking(run, *why_silent(run))
    try:
        version, info = client.version(), client.info()
    finally:
        client.close()
    there = (
        f"Docker {version['Version']} ({version.get('Os')}/{version.get('Arch')}), API {version['ApiVersion']}, "
        f"storage {info.get('Driver')}, {info.get('ContainersRunning')} containers running"
    )
    major = version["Version"].partition(".")[0]
    if major.isdigit() and int(major) < OLDEST:
        return warn(there, f"older than {OLDEST}, which is the oldest that was tried: upgrade it if containers fail")
    return ok(there)


def why_silent(run: DoctorRun) -> tuple[str, str]:
    """What is known about an engine that does not answer, and what to do."""
    url = run.engine_url or os.environ.get("DOCKER_HOST", "")
    if url:
        return f"none answers at {url}", "start it, or leave engine_url and DOCKER_HOST empty for the local one"
    if SOCKET.exists() and not os.access(SOCKET, os.R_OK | os.W_OK):
        return f"{SOCKET} is there, but this user may not use it", "add the user to the group `docker`, or run as root"
    if shutil.which("dockerd"):
        return (
            "installed, but it does not answer",
            "start it: `make setup` as root does, as does systemctl start docker",
        )
    return "not installed", "`make setup` as root installs and starts it (Debian)"


def image(run: DoctorRun) -> Finding:
    """The base image that tasks start from."""
    import docker.errors

    client = reached(run)
    if client is None:
        return unseen(run)
    name = SandboxConfig().image
    try:
        found = client.inspect_image(name)
    except docker.errors.ImageNotFound:
        return lacking(run, f"the engine does not have {name}", "`make setup` as root makes it in about a minute")
    finally:
        client.close()
    return ok(f"{name}, {found['Size'] / 1e6:.0f} MB, made {found['Created'][:10]}")


def confinement(run: DoctorRun) -> Finding:
    """The kernel features that limits and the system call filter stand on."""
    client = reached(run)
    if client is None:
        return unseen(run)
    try:
        info = client.info()
    finally:
        client.close()
    has_swap = any(line.startswith("SwapTotal") and line.split()[1] != "0" for line in meminfo())
    flags = {"MemoryLimit": "memory", "CpuCfsQuota": "CPU", "PidsLimit": "processes"}
    flags |= {"SwapLimit": "swap"} if has_swap else {}
    missing = [name for key, name in flags.items() if info.get(key) is False]
    is_filtered = any("seccomp" in option for option in info.get("SecurityOptions") or [])
    there = f"cgroup v{info.get('CgroupVersion', '1')} ({info.get('CgroupDriver')}), "
    there += "system calls are filtered" if is_filtered else "no seccomp"
    there += f", no limit on {' and '.join(missing)}" if missing else ", limits on " + ", ".join(flags.values())
    if not is_filtered:
        return fail(there, "containers could make any system call: use a kernel and an engine with seccomp")
    if missing:
        return warn(there, "what a task runs can use up the machine: enable these cgroup controllers in the kernel")
    return ok(there)


def meminfo() -> list[str]:
    return Path("/proc/meminfo").read_text().splitlines()


def container(run: DoctorRun) -> Finding:
    """A sample task's container starts, answers and is confined as it is meant to be; it is removed again."""
    from burnish.envs.sandbox.docker import DockerSandboxes
    from burnish.envs.task import load_task

    client = reached(run)
    if client is None:
        return unseen(run)
    client.close()
    try:
        sandboxes = DockerSandboxes(SandboxConfig(engine_url=run.engine_url, start_timeout_s=run.timeout_s))
    except SandboxUnavailable:
        return lacking(run, "not started: the base image is missing", "see the line above")
    try:
        task = load_task(min(path for path in SAMPLES.iterdir() if path.is_dir()))
        began = time.monotonic()
        sandbox = sandboxes.create(task, role="agent", run_id="doctor", attempt_id=f"doctor-{os.getpid()}")
        try:
            said = sandbox.run(LOOK, run.timeout_s).output.split()
        finally:
            sandbox.close()
    finally:
        sandboxes.close()
    there = f"started, answered and gone in {time.monotonic() - began:.1f} s"
    if said != ["NoNewPrivs:", "1", "Seccomp:", "2", "0"]:
        facts = "new privileges, unfiltered system calls or a network"
        return fail(f"{there}, but it has {facts}: {' '.join(said)!r}", "do not let a policy act in it")
    return ok(f"{there}; no network, no new privileges, system calls filtered")


def leftovers(run: DoctorRun) -> Finding:
    """What dead drivers left: containers, local sandboxes, files of Ray."""
    dead, living = Counter[str](), 0
    client = reached(run)
    now = time.time()
    if client is not None:
        try:
            for found in client.containers(all=True, filters={"label": "burnish=1"}):
                is_dead = is_orphan(found.get("Labels") or {}, now)
                dead["container"] += is_dead
                living += not is_dead
        finally:
            client.close()
    for text in owners(base_directory(), "*/owner"):
        labels = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        dead["local sandbox"] += is_orphan(labels, now)
    for text in owners(SHORT_TMP, f"{FOLDER}*/owner"):
        dead["folder of Ray"] += is_alive(text) is False
    there = ", ".join(f"{noun}: {count}" for noun, count in dead.items() if count)
    there = f"of dead drivers: {there}" if there else f"none; containers of living drivers: {living}"
    if client is None and run.sandbox is not SandboxKind.local:
        there += " (containers not looked at: no engine answers)"
    if any(dead.values()):
        return warn(there, "burnish reap removes sandboxes; the next burnish rl sweeps up the rest too")
    return ok(there)


def owners(folder: Path, pattern: str) -> Iterator[str]:
    """What these files say; one that goes away meanwhile belongs to somebody who cleans up."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            yield path.read_text("utf-8")
