"""The reaper removes what a killed driver left, by label, and nothing else."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from burnish.envs.config import ReapRun, SandboxConfig, SandboxKind
from burnish.envs.sandbox.base import open_sandboxes
from burnish.envs.sandbox.lease import driver_identity, is_alive, is_orphan
from burnish.envs.sandbox.local import base_directory, remove_tree
from burnish.envs.sandbox.processes import processes_of
from burnish.envs.sandbox.reap import (
    NAMELESS_S,
    main,
    reap_attempts,
    reap_containers,
    reap_driver,
    reap_local,
    rule_of,
    sentence,
)
from burnish.envs.task import load_task

DRIVER = """
import sys, time
from pathlib import Path
from burnish.envs.config import SandboxConfig, SandboxKind
from burnish.envs.sandbox.base import open_sandboxes
from burnish.envs.task import load_task
factory = open_sandboxes(SandboxConfig(), SandboxKind(sys.argv[1]))
made = factory.create(load_task(Path(sys.argv[2])), role="agent", run_id=sys.argv[3], attempt_id="a1")
made.run("(setsid sleep 98765 >/dev/null 2>&1 &)", 10)
sys.stdout.write(made.id + "\\n")
sys.stdout.flush()
time.sleep(60)
"""


def killed_driver(kind: str, task: Path, run: str) -> str:
    """Starts a driver with one sandbox, kills it with SIGKILL, returns the sandbox's id."""
    process = subprocess.Popen([sys.executable, "-c", DRIVER, kind, str(task), run], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    sandbox_id = process.stdout.readline().strip()
    assert sandbox_id
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    return sandbox_id


@pytest.fixture(scope="module")
def client() -> Iterator:
    factory = open_sandboxes(SandboxConfig(), SandboxKind.docker)
    yield factory.client
    factory.close()


def ids(client, run: str) -> set[str]:
    return {found["Id"] for found in client.containers(all=True, filters={"label": f"burnish.run={run}"})}


@pytest.mark.docker
def test_containers_of_a_killed_driver_go_and_all_others_stay(client, make_task):
    task = make_task()
    orphan = killed_driver("docker", task, "test-reap-dead")
    host = client.create_host_config(network_mode="none")
    foreign = client.create_container("burnish-base:1", ["true"], host_config=host, labels={"other": "1"})["Id"]
    factory = open_sandboxes(SandboxConfig(), SandboxKind.docker)
    living = factory.create(load_task(task), role="agent", run_id="test-reap-living", attempt_id="a1")
    try:
        assert ids(client, "test-reap-dead") == {orphan}
        counts = reap_containers("", rule_of(ReapRun(), time.time()))
        assert counts["removed"] >= 1
        assert counts["kept"] >= 1
        assert ids(client, "test-reap-dead") == set()
        assert ids(client, "test-reap-living") == {living.id}
        assert living.run("echo alive", 10).output == "alive\n"
        assert client.inspect_container(foreign)["Id"] == foreign
        # again: nothing left to do, and a run that is named goes although its driver lives
        assert reap_containers("", rule_of(ReapRun(run="test-reap-dead"), time.time()))["removed"] == 0
        assert reap_containers("", rule_of(ReapRun(run="test-reap-living"), time.time()))["removed"] == 1
        assert ids(client, "test-reap-living") == set()
    finally:
        living.close()
        client.remove_container(foreign, force=True)


@pytest.mark.docker
def test_a_lease_that_is_over_is_enough_and_stopped_containers_count(client, make_task):
    factory = open_sandboxes(SandboxConfig(lease_s=0.001), SandboxKind.docker)
    made = factory.create(load_task(make_task()), role="agent", run_id="test-reap-lease", attempt_id="a1")
    client.kill(made.id)
    time.sleep(1.1)
    assert reap_containers("", rule_of(ReapRun(), time.time()))["removed"] >= 1
    assert ids(client, "test-reap-lease") == set()
    made.close()


def test_folders_and_processes_of_a_killed_driver_go_too(make_task):
    sandbox_id = killed_driver("local", make_task(), "test-reap-local").removeprefix("local-")
    assert processes_of(sandbox_id)
    factory = open_sandboxes(SandboxConfig(), SandboxKind.local)
    living = factory.create(load_task(make_task()), role="agent", run_id="test-reap-local-living", attempt_id="a1")
    assert reap_local(rule_of(ReapRun(), time.time()), is_nameless_due=True)["removed"] >= 1
    assert not processes_of(sandbox_id)
    assert not (base_directory() / sandbox_id).exists()
    assert living.run("echo alive", 10).output == "alive\n"
    assert reap_local(rule_of(ReapRun(run="test-reap-local-living"), time.time()))["removed"] == 1
    living.close()


@pytest.mark.docker
def test_the_verb_says_what_it_did(capsys):
    assert main(ReapRun(run="test-reap-no-such-run")) == 0
    assert capsys.readouterr().out.startswith("0 containers removed, ")


def test_liveness_of_a_driver_is_known_or_said_to_be_unknown():
    mine = driver_identity()
    host, boot, namespace, pid, started = mine.split("/")
    assert is_alive(mine) is True
    # the same number, another process
    assert is_alive("/".join([host, boot, namespace, pid, str(int(started) + 1)])) is False
    assert is_alive("/".join([host, "other-boot", namespace, pid, started])) is False
    # another machine or namespace: only the lease can tell
    assert is_alive("/".join(["other-host", boot, namespace, pid, started])) is None
    assert is_alive("/".join([host, boot, "[1]", pid, started])) is None
    assert is_alive("nonsense") is None
    child = os.fork()
    if child == 0:
        os._exit(0)
    # a zombie is dead
    time.sleep(0.1)
    assert is_alive("/".join([host, boot, namespace, str(child), started])) is False
    os.waitpid(child, 0)


def test_who_is_due():
    now = 1000.0
    living = {"burnish.run": "r", "burnish.lease": "2000", "burnish.driver": driver_identity()}
    assert not is_orphan(living, now)
    assert is_orphan({**living, "burnish.lease": "999"}, now)
    assert not is_orphan({**living, "burnish.driver": "another/machine/x/1/1"}, now)
    assert rule_of(ReapRun(run="r"), now)(living)
    assert not rule_of(ReapRun(run="other"), now)({**living, "burnish.lease": "999"})
    assert sentence({"removed": 1, "kept": 2, "failed": 0}, "container") == "1 container removed, 2 kept"  # pyright: ignore


def test_a_local_sandbox_that_a_kill_left_without_an_owner_goes_once_it_is_old():
    young, old = (base_directory() / f"nameless-{name}-{os.getpid()}" for name in ("young", "old"))
    for home in (young, old):
        (home / "app").mkdir(parents=True)
    before = time.time() - NAMELESS_S - 60
    os.utime(old, (before, before))
    try:
        reap_local(rule_of(ReapRun(run="another"), time.time()))
        assert old.exists(), "a named run is all that was asked for"
        reap_local(rule_of(ReapRun(), time.time()), is_nameless_due=True)
        assert (young.exists(), old.exists()) == (True, False)
    finally:
        for home in (young, old):
            remove_tree(home)


@pytest.mark.docker
def test_attempts_of_a_dead_worker_go_and_its_siblings_stay(make_task):
    driver, task = driver_identity(), load_task(make_task())
    for kind in (SandboxKind.docker, SandboxKind.local):
        factory = open_sandboxes(SandboxConfig(driver=driver), kind)
        made = {
            name: factory.create(task, role="agent", run_id="test-reap-attempts", attempt_id=name)
            for name in ("lost-0", "lost-1", "other")
        }
        assert reap_attempts("", driver, "another run", {"lost-0"}) == 0
        assert reap_attempts("", "another/driver", "test-reap-attempts", {"lost-0"}) == 0
        assert reap_attempts("", driver, "test-reap-attempts", {"lost-0", "lost-1"}) == 2
        assert made["other"].run("echo alive", 10).output == "alive\n"
        assert reap_driver("", driver) >= 1
        factory.close()
