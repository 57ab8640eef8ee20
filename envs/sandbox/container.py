"""One running container as a sandbox: a persistent shell over one exec socket, time limits, files out, removal."""

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import docker.errors
import requests.exceptions

from burnish.envs.config import SandboxConfig
from burnish.envs.sandbox.archive import Collector, checked_name, pack, read_entry
from burnish.envs.sandbox.base import Artifacts, ExecResult, SandboxCrashed, SandboxError
from burnish.envs.sandbox.shell import ARGV, Shell, quote, result

log = logging.getLogger(__name__)

SETUP_TIMEOUT_S = 60.0
ARTIFACT_TIMEOUT_S = 10.0
ARTIFACT_SHELL_MAX = 4 << 20
"""Bytes of an archive that may come through the shell; the engine's call reads larger ones as a stream."""

# kills every process that is neither in the list of older ones nor below one of them. First all are stopped, until no new one
# appears, so that no parent goes on with its next command when its child dies. Builtins only: it must run where no
# process can be made any more. Prints the shell's directory and `done`.
KILL = r"""
shell=$1; shift; old=" $* "
builtin cd -P "/proc/$shell/cwd" 2>/dev/null && builtin printf '%s' "$PWD"
is_new() {
  local pid=$1 stat
  while ((pid > 1)); do
    ((pid == shell)) && return 0
    [[ $old == *" $pid "* ]] && return 1
    IFS= read -r -d '' stat 2>/dev/null <"/proc/$pid/stat"
    stat=${stat##*) }; stat=${stat#* }; pid=${stat%% *}
    [[ $pid =~ ^[0-9]+$ ]] || return 0
  done
  return 0
}
for signal in STOP KILL; do
  declare -A seen=()
  for round in {1..50}; do
    found=0
    for entry in /proc/[0-9]*; do
      pid=${entry#/proc/}
      ((pid == 1 || pid == $$)) && continue
      [[ ${seen[$pid]} ]] && continue
      is_new "$pid" || continue
      seen[$pid]=1; found=1
      builtin kill -$signal "$pid" 2>/dev/null
    done
    ((found)) || break
  done
  ((found)) && exit 1
  unset seen
done
builtin printf '\036done'
"""
KILLED = b"\x1edone"


@contextlib.contextmanager
def engine_errors(what: str) -> Iterator[None]:
    """Failures of the engine and of the way to it become SandboxError."""
    try:
        yield
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise SandboxError(f"{what}: {error}") from error


class ExecChannel:
    """The two streams of one exec, over its hijacked connection: 8-byte headers around what the process wrote."""

    def __init__(self, client: Any, container_id: str) -> None:
        self.client = client
        self.exec_id = client.exec_create(container_id, list(ARGV), stdin=True)["Id"]
        # the response must stay referenced: dropping it closes the socket
        self.stream = client.exec_start(self.exec_id, socket=True)
        self.socket: socket.socket = getattr(self.stream, "_sock", self.stream)
        self.poll = select.poll()
        self.poll.register(self.socket, select.POLLIN)
        self.buffer = bytearray()
        self.payload_left = 0

    def send(self, data: bytes, timeout_s: float) -> None:
        self.socket.settimeout(timeout_s)
        self.socket.sendall(data)

    def receive(self, timeout_s: float) -> bytes | None:
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            # below a millisecond poll would return at once
            if not self.poll.poll(max(1, int(left * 1000))):
                return None
            try:
                chunk = self.socket.recv(1 << 18)
            except ConnectionResetError:
                return b""
            if not chunk:
                return b""
            if payload := self.demultiplex(chunk):
                return payload
            if left <= 0:
                return None

    def demultiplex(self, chunk: bytes) -> bytes:
        self.buffer += chunk
        out = bytearray()
        while True:
            taken = self.buffer[: self.payload_left]
            out += taken
            del self.buffer[: len(taken)]
            self.payload_left -= len(taken)
            if self.payload_left or len(self.buffer) < 8:
                return bytes(out)
            self.payload_left = int.from_bytes(self.buffer[4:8], "big")
            del self.buffer[:8]

    def ended(self) -> bool:
        with engine_errors("the engine does not say whether the shell runs"):
            return not self.client.exec_inspect(self.exec_id)["Running"]

    def exit_code(self) -> int | None:
        with engine_errors("the engine does not say how the shell ended"):
            return self.client.exec_inspect(self.exec_id)["ExitCode"]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()
            self.stream.close()


class DockerSandbox:
    """One container. See `Sandbox` for what its methods promise."""

    def __init__(self, client: Any, container_id: str, config: SandboxConfig, workdir: str) -> None:
        self.client = client
        self.id = container_id
        self.config = config
        self.directory = workdir
        self.shell: Shell | None = None
        self.lock = threading.Lock()
        self.quiet: frozenset[int] = frozenset()
        """Processes of a container in which nothing of the agent's runs, its shell aside."""
        self.is_closed = False
        self.has_crashed = False
        self.began = time.time()
        """When the processes of now were started: the container's start, or our last restart of it."""

    def open_shell(self, setup: str = "") -> Shell:
        """A shell that answers, in the directory of the one before."""
        with engine_errors(f"no shell in container {self.id[:12]}"):
            shell = Shell(ExecChannel(self.client, self.id))
        # an image that was built brings its own working directory
        go_there = f"cd -- {quote(self.directory)} 2>/dev/null || cd /" if self.directory else ":"
        reply = shell.run(f"{setup} && {{ {go_there}; }}" if setup else go_there, SETUP_TIMEOUT_S, 4000)
        if reply.frame is None or reply.frame.status != 0:
            shell.channel.close()
            self.raise_if_stopped()
            self.has_crashed = True
            raise SandboxCrashed(f"no bash starts in container {self.id[:12]}: {reply.capture.text().strip()}")
        if setup:
            self.quiet = reply.frame.processes - {reply.frame.shell_pid}
        return shell

    def run(self, command: str, timeout_s: float) -> ExecResult:
        with self.lock:
            if self.is_closed:
                raise SandboxError(f"container {self.id[:12]} is closed")
            if self.shell is None:
                self.raise_if_stopped()
                self.shell = self.open_shell()
            shell = self.shell
            reply = shell.run(command, timeout_s, self.config.output_cap_bytes)
            if reply.frame is not None:
                self.directory = reply.frame.directory
                if reply.frame.is_gone:
                    self.shell = None
                    shell.channel.close()
                return result(reply, reply.frame.status)
            self.shell = None
            if reply.ended:
                code = shell.channel.exit_code()
                shell.channel.close()
                self.raise_if_stopped(patience_s=0.5 if code == 137 else 0.0)
                return result(reply, code)
            self.kill_command(shell)
            shell.channel.close()
            return result(reply, None, timed_out=True)

    def kill_command(self, shell: Shell) -> None:
        """Ends the command and its shell, and whatever it started; older background processes are spared."""
        assert shell.frame is not None, "the set-up command has ended before any other begins"
        spared = shell.frame.processes - {1, shell.frame.shell_pid}
        argv = [
            "bash",
            "--noprofile",
            "--norc",
            "-c",
            KILL,
            "bash",
            str(shell.frame.shell_pid),
            *map(str, sorted(spared)),
        ]
        try:
            made = self.client.exec_create(self.id, argv, workdir="/")
            output = b""
            # not to the end of the stream: the engine holds that back for seconds while background work of the dead shell
            # keeps its output open
            for chunk in self.client.exec_start(made["Id"], stream=True):
                output += chunk
                if output.endswith(KILLED):
                    break
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            log.debug("container %s: no process can be made (%s)", self.id[:12], error)
            output = b""
        if output.startswith(b"/"):
            self.directory = output.removesuffix(KILLED).decode("utf-8", "surrogateescape")
        if not output.endswith(KILLED):
            self.raise_if_stopped()
            # the file tree stays, every process goes: what is left when nothing can be started inside
            with engine_errors(f"container {self.id[:12]} cannot be restarted after a time limit"):
                self.client.restart(self.id, timeout=0)
                self.began = time.time()

    def raise_if_stopped(self, patience_s: float = 0.0) -> None:
        """Raises:
        SandboxCrashed: the container is there but has stopped.
        SandboxError: the engine does not answer, or somebody removed the container.
        """
        until = time.monotonic() + patience_s
        while True:
            with engine_errors(f"container {self.id[:12]}"):
                state = self.client.inspect_container(self.id)["State"]
            if state.get("Status") in ("removing", "dead"):
                raise SandboxError(f"container {self.id[:12]} is being removed by somebody else")
            if not state["Running"]:
                if state.get("ExitCode") == 137 and not state.get("OOMKilled") and self.was_killed():
                    raise SandboxError(f"container {self.id[:12]} was killed through the engine")
                why = " (out of memory)" if state.get("OOMKilled") else ""
                raise SandboxCrashed(f"container {self.id[:12]} stopped with code {state.get('ExitCode')}{why}")
            if time.monotonic() >= until:
                return
            time.sleep(0.05)

    def was_killed(self) -> bool:
        """Somebody outside ended it: nothing inside can send the engine a kill."""
        events = self.client.events(
            since=f"{self.began:.6f}",
            until=f"{time.time():.6f}",
            filters={"container": self.id, "event": "kill"},
            decode=True,
        )
        with contextlib.closing(events):
            return any(True for _ in events)

    def put_files(self, files: Mapping[str, bytes | Path], destination: str) -> None:
        placed = {
            f"{destination.rstrip('/')}/{checked_name(name)}": read_entry(source) for name, source in files.items()
        }
        with engine_errors(f"files into container {self.id[:12]}"):
            self.client.put_archive(self.id, "/", pack(placed))

    def get_artifacts(self, paths: Sequence[str]) -> Artifacts:
        found = None
        # a command may still run in another thread
        if self.lock.acquire(blocking=False):
            try:
                found = self.shell_artifacts(paths)
            finally:
                self.lock.release()
        return found or read_artifacts(self.client, self.id, paths, self.config)

    def shell_artifacts(self, paths: Sequence[str]) -> Artifacts | None:
        """The same from a tar that the shell writes, for a tenth of what the engine's archive call costs.

        The container may lie about its files, but it can send nothing that it could not have written to them. None, and then
        the engine reads, when there is no shell, when background work could write into the stream, and for anything odd.
        """
        frame = self.shell.frame if self.shell is not None else None
        if (
            self.shell is None
            or frame is None
            or not frame.processes <= self.quiet | {frame.shell_pid}
            or self.shell.early
        ):
            return None
        collector = Collector(max_bytes=self.config.artifact_cap_mb << 20, max_files=self.config.artifact_max_files)
        for path in paths:
            parent, _, name = path.rstrip("/").rpartition("/")
            command = (
                f"builtin command -p tar -C {quote(parent or '/')} --sort=name -cf - -- {quote(name)} 2>/dev/null >&201"
            )
            reply = self.shell.run(command, ARTIFACT_TIMEOUT_S, ARTIFACT_SHELL_MAX)
            data = reply.capture.raw()
            if reply.frame is None or reply.frame.is_gone:
                self.shell.channel.close()
                self.shell = None
                return None
            # whole blocks, closed by two empty ones
            if reply.frame.status != 0 or not data or len(data) % 512 or data[-1024:].strip(b"\0"):
                return None
            collector.add_archive([data], path)
        return collector.result()

    def alive(self) -> bool:
        """Raises:
        SandboxError: the engine does not answer, or somebody removed the container: not the agent's doing.
        """
        if self.is_closed or self.has_crashed:
            return False
        try:
            self.raise_if_stopped()
        except SandboxCrashed:
            return False
        return True

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self.shell is not None:
            self.shell.channel.close()
        remove(self.client, self.id)


def remove(client: Any, container_id: str) -> bool:
    """Removes a container and its volumes; True when it is gone, whoever removed it."""
    try:
        client.remove_container(container_id, v=True, force=True)
    except docker.errors.NotFound:
        return True
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        if "already in progress" in str(error):
            return True
        log.warning("container %s is left to `burnish reap`: %s", container_id[:12], error)
        return False
    return True


def read_artifacts(client: Any, container_id: str, paths: Sequence[str], config: SandboxConfig) -> Artifacts:
    """Regular files below `paths`, read through the engine: nothing of the container runs."""
    collector = Collector(max_bytes=config.artifact_cap_mb << 20, max_files=config.artifact_max_files)
    for path in paths:
        try:
            chunks, _ = client.get_archive(container_id, path)
        except docker.errors.NotFound as error:
            if "No such container" in str(error):
                raise SandboxError(f"container {container_id[:12]} is gone") from error
            collector.missing.append(path)
            continue
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            raise SandboxError(f"{path} of container {container_id[:12]}: {error}") from error
        with engine_errors(f"{path} of container {container_id[:12]}"), contextlib.closing(chunks):
            collector.add_archive(chunks, path)
    return collector.result()
