"""What only containers can promise: limits, no network, few rights, and telling the agent's crash from the engine's failure."""

import json
import logging
import threading

import docker.errors
import pytest

from burnish.envs.config import SandboxConfig, SandboxKind
from burnish.envs.sandbox.base import SandboxCrashed, SandboxError, SandboxUnavailable, open_sandboxes
from burnish.envs.sandbox.container import read_artifacts
from burnish.envs.sandbox.docker import DockerSandboxes
from burnish.envs.sandbox.local import LocalSandboxes
from burnish.envs.task import load_task

RUN = "test-docker"
# forks until it may not; 64 less init, what keeps the container up, the shell and itself
FORK = """
import os, signal, time
children = []
try:
    while True:
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
        children.append(pid)
except OSError as error:
    print(len(children), error)
for pid in children:
    os.kill(pid, signal.SIGKILL)
    os.wait()
"""


@pytest.fixture(scope="module")
def factory():
    made = DockerSandboxes(SandboxConfig(memory_mb=128, max_processes=64, max_file_mb=2))
    yield made
    made.close()
    left = made.client.containers(all=True, filters={"label": f"burnish.run={RUN}"})
    assert not left, [container["Labels"] for container in left]


@pytest.fixture
def sandbox(factory, make_task):
    made = factory.create(load_task(make_task()), role="agent", run_id=RUN, attempt_id="a1")
    yield made
    made.close()


@pytest.mark.docker
def test_a_container_is_labelled_sealed_and_limited(factory, sandbox):
    seen = factory.client.inspect_container(sandbox.id)
    labels, host = seen["Config"]["Labels"], seen["HostConfig"]
    expected = {"burnish": "1", "burnish.run": RUN, "burnish.attempt": "a1", "burnish.role": "agent"}
    assert expected.items() <= labels.items()
    assert int(labels["burnish.lease"]) > 0
    assert (host["NetworkMode"], host["Init"], host["PidsLimit"]) == ("none", True, 64)
    assert (host["Memory"], host["MemorySwap"], host["NanoCpus"]) == (128 << 20, 128 << 20, 10**9)
    status = sandbox.run("grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status", 10).output.split()
    # chown, dac_override, fowner, fsetid, kill, setgid, setuid
    assert status[1::2] == ["00000000000000fb", "1", "2"]


# raw calls by number on x86-64 and arm64: keyctl, io_uring_setup, bpf, unshare(CLONE_NEWUSER), clone3
CALLS = """
import ctypes, os, platform, subprocess, threading
numbers = {'x86_64': (250, 425, 321, 272, 435), 'aarch64': (219, 425, 280, 97, 435)}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
errors = []
for number, argument in zip(numbers, (0, 1, 0, 0x10000000, 0)):
    libc.syscall(number, argument, 0, 0, 0, 0)
    errors.append(os.strerror(ctypes.get_errno()))
print(*errors, sep='; ')
threads = [threading.Thread(target=subprocess.run, args=(['true'],)) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print('threads and programs run')
"""


@pytest.mark.docker
def test_system_calls_that_reach_for_the_kernel_are_refused_and_ordinary_programs_run(sandbox):
    done = sandbox.run(
        f'python3 -c "{CALLS}"; mount -t tmpfs none /mnt; git init -q . && git status --short | head -1', 20
    )
    refused, ordinary, *rest = done.output.splitlines()
    assert refused == "; ".join(["Operation not permitted"] * 4 + ["Function not implemented"])
    assert ordinary == "threads and programs run"
    assert "permission denied" in rest[0]
    assert rest[-1] == "?? note.txt"


@pytest.mark.docker
def test_there_is_a_loopback_and_nothing_else(sandbox):
    program = (
        "import socket; s = socket.create_server(('localhost', 0)); socket.create_connection(s.getsockname()); print('lo')\n"
        "try: socket.create_connection(('192.0.2.1', 80), 2)\n"
        "except OSError as error: print(error)\n"
    )
    done = sandbox.run(f'ls /sys/class/net; python3 -c "{program}"', 20)
    assert done.output == "lo\nlo\n[Errno 101] Network is unreachable\n"


@pytest.mark.docker
def test_memory_processes_and_file_sizes_are_limited_and_the_shell_lives_on(sandbox):
    assert sandbox.run("python3 -c 'x = bytearray(300 << 20)'", 20).exit_code == 137
    done = sandbox.run(f'python3 -c "{FORK}"', 20)
    assert done.output.startswith("60 "), done.output
    assert "Resource temporarily unavailable" in done.output
    assert sandbox.run("head -c 9000000 /dev/zero > big; stat -c %s big", 20).output.endswith("2097152\n")
    assert sandbox.run("echo next", 10).output == "next\n"


@pytest.mark.docker
def test_orphans_are_reaped(sandbox):
    # C-12: more than the limit on processes
    sandbox.run("for i in {1..300}; do (sleep 0.01 &); done; sleep 0.5", 30)
    assert sandbox.run("ps -eo stat | grep -c '^Z'", 10).output == "0\n"


@pytest.mark.docker
def test_a_fork_bomb_is_ended_by_the_time_limit(sandbox):
    sandbox.run("cd /tmp; echo kept > /app/state", 10)
    done = sandbox.run(":(){ :|:& };:; sleep 100", 1.0)
    assert done.timed_out
    assert sandbox.run("cat /app/state; pwd; ps -e | wc -l", 20).output.splitlines()[:2] == ["kept", "/tmp"]


@pytest.mark.docker
def test_the_container_is_restarted_when_nothing_can_be_started_inside(factory, sandbox):
    sandbox.run("cd /tmp; echo kept > /app/state; sleep 77777 &", 10)
    # a bash that does not run the killer stands for whatever keeps it from running
    fake = '#!/bin/sh\\ncase "$*" in *"builtin kill"*) exit 0;; esac\\nexec /bin/bash.real "$@"\\n'
    sandbox.run(f"cp /bin/bash /bin/bash.real; printf '{fake}' > /bin/b; chmod +x /bin/b; mv /bin/b /bin/bash", 10)
    started = factory.client.inspect_container(sandbox.id)["State"]["StartedAt"]
    assert sandbox.run("sleep 54321", 0.5).timed_out
    assert factory.client.inspect_container(sandbox.id)["State"]["StartedAt"] != started
    assert sandbox.run("cat /app/state; pwd; pgrep -c sleep", 10).output == "kept\n/tmp\n0\n"


@pytest.mark.docker
def test_without_a_shell_the_environment_counts_as_crashed_and_its_files_are_still_read(sandbox):
    sandbox.run("rm -f /bin/bash; echo x > state; exit", 10)
    with pytest.raises(SandboxCrashed, match="no bash starts"):
        sandbox.run("true", 5)
    assert not sandbox.alive()
    assert "/app/state" in [file.path for file in sandbox.get_artifacts(["/app"]).files]


@pytest.mark.docker
def test_a_container_that_the_agent_ended_is_a_crash_and_its_files_are_still_read(sandbox):
    sandbox.run("echo hello > out.txt", 10)
    # what an agent may do by accident ends at most its own shell
    assert sandbox.run("kill 1; pkill sleep; pkill -9 sleep; echo on", 10).output == "on\n"
    sandbox.run("pkill -9 bash", 10)
    assert sandbox.run("cat out.txt", 10).output == "hello\n"
    with pytest.raises(SandboxCrashed, match="stopped with code 137"):
        sandbox.run("pkill -9 burnish-wait; sleep 5", 10)
    assert not sandbox.alive()
    with pytest.raises(SandboxCrashed):
        sandbox.run("true", 10)
    found = sandbox.get_artifacts(["/app/out.txt"]).file("/app/out.txt")
    assert found is not None
    assert found.content == b"hello\n"


@pytest.mark.docker
def test_artifacts_through_the_shell_are_those_the_engine_reads(factory, sandbox):
    sandbox.run(
        "ln -s /etc/passwd link; mkfifo pipe; mkdir -p sub/empty; echo x > 'a b'; chmod 6755 'a b'; ln 'a b' z", 10
    )
    quick = sandbox.shell_artifacts(["/app"])
    engine = read_artifacts(factory.client, sandbox.id, ["/app"], factory.config)
    assert quick is not None
    assert quick.content_hash == engine.content_hash
    assert dict(quick.rejected) == dict(engine.rejected) == {
        "/app/link": "symbolic link",
        "/app/pipe": "FIFO",
        "/app/z": "hard link",
    }  # fmt: skip
    # whatever could spoil the stream leaves it to the engine
    assert sandbox.shell_artifacts(["/app", "/nowhere"]) is None
    sandbox.run("head -c 5000000 /dev/zero | split -b 1000000 - big", 20)
    assert sandbox.shell_artifacts(["/app"]) is None
    assert len([file for file in sandbox.get_artifacts(["/app"]).files if "big" in file.path]) == 5
    sandbox.run("rm big*; tar() { echo fake; }; command() { echo fake; }; exec > /dev/null", 10)
    assert sandbox.get_artifacts(["/app"]).content_hash == engine.content_hash
    sandbox.run("(while :; do echo noise; sleep 0.01; done) >&201 &", 10)
    assert sandbox.shell_artifacts(["/app"]) is None
    assert sandbox.get_artifacts(["/app"]).content_hash == engine.content_hash


@pytest.mark.docker
def test_a_container_that_somebody_removed_is_an_infrastructure_failure(factory, make_task):
    # C-33: in the middle of a command
    made = factory.create(load_task(make_task()), role="agent", run_id=RUN, attempt_id="a1")
    timer = threading.Timer(0.5, factory.client.remove_container, [made.id], {"force": True, "v": True})
    timer.start()
    with pytest.raises(SandboxError, match=r"No such container|removed by somebody else") as caught:
        made.run("sleep 60", 30)
    timer.join()
    assert not isinstance(caught.value, SandboxCrashed)
    with pytest.raises(SandboxError):
        made.alive()
    made.close()
    made.close()


@pytest.mark.docker
def test_a_container_that_was_killed_through_the_engine_is_an_infrastructure_failure(factory, make_task):
    made = factory.create(load_task(make_task()), role="agent", run_id=RUN, attempt_id="a1")
    timer = threading.Timer(0.5, factory.client.kill, [made.id])
    timer.start()
    with pytest.raises(SandboxError, match="was killed through the engine") as caught:
        made.run("sleep 60", 30)
    timer.join()
    assert not isinstance(caught.value, SandboxCrashed)
    made.close()


@pytest.mark.docker
def test_volumes_of_the_image_go_with_the_container(factory, make_task):
    # C-18; also a Dockerfile that needs a build
    before = factory.client.volumes()["Volumes"] or []
    task = load_task(make_task(files={"environment/Dockerfile": "FROM burnish-base:1\nVOLUME /data\nWORKDIR /data\n"}))
    made = factory.create(task, role="agent", run_id=RUN, attempt_id="a1")
    image = factory.client.inspect_container(made.id)["Config"]["Image"]
    try:
        assert made.run("pwd; touch x", 10).output == "/data\n"
        assert len(factory.client.volumes()["Volumes"] or []) == len(before) + 1
    finally:
        made.close()
        factory.client.remove_image(image)
        factory.known_images.discard(image)
    assert len(factory.client.volumes()["Volumes"] or []) == len(before)


@pytest.mark.docker
def test_many_files_go_in_through_the_archive_call(factory, make_task):
    folder = make_task()
    (folder / "environment/files/sub").mkdir()
    (folder / "environment/files/sub/large.bin").write_bytes(bytes(range(256)) * 4096)
    made = factory.create(load_task(folder), role="agent", run_id=RUN, attempt_id="a1")
    assert made.run("stat -c '%s %U %a' sub/large.bin; cat note.txt", 10).output == "1048576 root 644\na note\n"
    made.close()


@pytest.mark.docker
def test_a_failed_build_and_a_missing_image_are_named_and_leave_nothing(factory, make_task):
    broken = load_task(make_task("a", {"environment/Dockerfile": "FROM burnish-base:1\nRUN echo why; false\n"}))
    with pytest.raises(SandboxError, match=r"environment/Dockerfile: the build failed"):
        factory.create(broken, role="agent", run_id=RUN, attempt_id="a1")
    missing = load_task(make_task("b", {"environment/Dockerfile": "FROM burnish-no-such:7\nWORKDIR /app\n"}))
    with pytest.raises(SandboxError, match="image burnish-no-such:7 is not on this machine"):
        factory.create(missing, role="agent", run_id=RUN, attempt_id="a1")


def test_docker_without_an_engine_is_one_sentence_and_auto_falls_back_with_a_warning(caplog, tmp_path):
    config = SandboxConfig(engine_url=f"unix://{tmp_path}/nobody.sock")
    with pytest.raises(
        SandboxUnavailable, match="sandbox=docker needs a Docker engine, but none answers at unix:"
    ) as caught:
        open_sandboxes(config, SandboxKind.docker)
    assert "\n" not in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert isinstance(open_sandboxes(config, SandboxKind.auto), LocalSandboxes)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    assert isinstance(open_sandboxes(config, SandboxKind.local), LocalSandboxes)


@pytest.mark.docker
def test_docker_without_the_base_image_says_how_to_make_it():
    with pytest.raises(SandboxUnavailable, match="run `make setup`"):
        open_sandboxes(SandboxConfig(image="burnish-no-such:7"), SandboxKind.docker)


@pytest.mark.docker
def test_containers_work_from_many_threads(factory, make_task):
    task = load_task(make_task())
    outputs: list[str] = []

    def episode(number: int) -> None:
        made = factory.create(task, role="agent", run_id=RUN, attempt_id=f"a{number}")
        try:
            outputs.append(made.run(f"echo {number} > n; cat n", 30).output)
            assert made.get_artifacts(["/app/n"]).files
        finally:
            made.close()

    threads = [threading.Thread(target=episode, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outputs) == [f"{number}\n" for number in range(8)]


def test_limits_out_of_range_are_refused():
    for key, value in [
        ("memory_mb", 1),
        ("cpus", 0.0),
        ("cpus", float("nan")),
        ("output_cap_bytes", 1),
        ("lease_s", -1.0),
    ]:
        with pytest.raises(ValueError, match=f"{key} must be"):
            SandboxConfig(**json.loads(json.dumps({key: value})))


@pytest.mark.docker
def test_removing_a_container_twice_is_fine(factory, sandbox):
    factory.client.remove_container(sandbox.id, force=True, v=True)
    sandbox.close()
    with pytest.raises(docker.errors.NotFound):
        factory.client.inspect_container(sandbox.id)
