"""Sandboxes as subprocesses in a temporary directory, for machines without Docker. The same shell protocol; no isolation.

The task's absolute paths (/app, /tests, /logs, ...) stand for folders below the sandbox's own root: they are replaced in commands and
in the trusted scripts, and back in what the agent sees. A program that is told such a path in another way sees the machine's own.
Memory, CPU and network are not limited. Every process carries the sandbox's id in its environment, so that also
those that left the session are found.
"""

import contextlib
import os
import re
import secrets
import select
import shutil
import stat
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from burnish.envs.config import SandboxConfig, SandboxKind
from burnish.envs.sandbox.archive import Collector, Entry, checked_name, read_entry
from burnish.envs.sandbox.base import ArtifactFile, Artifacts, ExecResult, OneShot, SandboxCrashed, SandboxError
from burnish.envs.sandbox.images import ImagePlan, plan_agent, plan_verifier
from burnish.envs.sandbox.lease import labels
from burnish.envs.sandbox.processes import MARK, directory_of, end_processes
from burnish.envs.sandbox.shell import ARGV, Shell, quote, result
from burnish.envs.task import Task, TaskError

SETUP_TIMEOUT_S = 30.0
OWN_FOLDERS = ("app", "tests", "logs", "solution", "tmp", "root")


def base_directory() -> Path:
    return Path(tempfile.gettempdir()) / f"burnish-sandboxes-{os.getuid()}"


class PipeChannel:
    """Pipes to a bash started here."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            ARGV,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd=directory,
            env=dict(environment),
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.input, False)
        self.readable, self.writable = select.poll(), select.poll()
        self.readable.register(self.output, select.POLLIN)
        self.writable.register(self.input, select.POLLOUT)

    def send(self, data: bytes, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while data:
            left = deadline - time.monotonic()
            if left <= 0 or not self.writable.poll(max(1, int(left * 1000))):
                raise TimeoutError("the shell takes no input")
            # a full pipe may take less than poll promised
            with contextlib.suppress(BlockingIOError):
                data = data[os.write(self.input, data) :]

    def receive(self, timeout_s: float) -> bytes | None:
        return os.read(self.output, 1 << 16) if self.readable.poll(max(1, int(timeout_s * 1000))) else None

    def ended(self) -> bool:
        return self.process.poll() is not None

    def exit_code(self) -> int | None:
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return None
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1.0)


class FileTree:
    """A sandbox's root, and the replacement of the task's absolute paths by paths below it."""

    def __init__(self, owner: Mapping[str, str], folders: Sequence[str]) -> None:
        self.id = secrets.token_hex(6)
        self.home = base_directory() / self.id
        self.root = self.home / "root"
        for name in folders:
            (self.root / name).mkdir(parents=True, exist_ok=True)
        base_directory().chmod(0o700)
        (self.home / "owner").write_text("\n".join(f"{key}={value}" for key, value in owner.items()))
        names = "|".join(map(re.escape, folders))
        self.pattern = re.compile(rf"(?<![\w./~-])/(?=(?:{names})(?![\w.-]))")

    def inward(self, text: str) -> str:
        return self.pattern.sub(f"{self.root}/", text)

    def outward(self, text: str) -> str:
        return text.replace(f"{self.root}/", "/").replace(str(self.root), "/")

    def place(self, path: str) -> Path:
        return self.root / checked_name(path.lstrip("/"))

    def write(self, path: str, entry: Entry) -> None:
        target = self.place(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # never through a link that is there: a new file takes its place
        fresh = target.with_name(f".{secrets.token_hex(4)}")
        fresh.write_bytes(entry.content)
        fresh.chmod(entry.mode)
        fresh.replace(target)

    def environment(self, plan: ImagePlan) -> dict[str, str]:
        own = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "LANG": "C.UTF-8",
            "HOME": str(self.root / "root"),
            "TMPDIR": str(self.root / "tmp"),
            MARK: self.id,
        }
        return {**own, **{key: self.inward(value) for key, value in plan.env.items()}}

    def prepare(self, plan: ImagePlan) -> None:
        for name in plan.directories:
            self.place(name).mkdir(parents=True, exist_ok=True)
        for path, entry in plan.files.items():
            self.write(path, entry)

    def collect(self, paths: Sequence[str], config: SandboxConfig) -> Artifacts:
        collector = Collector(max_bytes=config.artifact_cap_mb << 20, max_files=config.artifact_max_files)
        for path in paths:
            place = self.place(path)
            if place.is_symlink() or place.exists():
                self.collect_one(collector, place, path)
            else:
                collector.missing.append(path)
        return collector.result()

    def collect_one(self, collector: Collector, place: Path, path: str) -> None:
        """Walks without following links; the same rules and caps as for a container's archive."""
        collector.seen += 1
        if collector.seen > collector.max_files:
            collector.reject(path, f"more than {collector.max_files} files")
            return
        status = place.lstat()
        if stat.S_ISDIR(status.st_mode):
            collector.directories[path] = None
            for inner in sorted(place.iterdir()):
                if collector.seen <= collector.max_files:
                    self.collect_one(collector, inner, f"{path.rstrip('/')}/{inner.name}")
        elif not stat.S_ISREG(status.st_mode):
            collector.reject(path, "symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file")
        elif status.st_size > collector.max_bytes:
            collector.reject(path, f"larger than the {collector.max_bytes} bytes that are left")
        else:
            # O_NOFOLLOW: it may have become a link since
            descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as stream:
                content = stream.read(collector.max_bytes)
            collector.max_bytes -= len(content)
            collector.files[path] = ArtifactFile(path=path, content=content, mode=status.st_mode & 0o777)

    def remove(self) -> None:
        end_processes(self.id)
        remove_tree(self.home)


def remove_tree(home: Path) -> None:
    # a folder without rights for its owner would stop rmtree
    with contextlib.suppress(OSError):
        for folder, names, _ in os.walk(home):
            for name in names:
                path = Path(folder, name)
                if not path.is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(home, ignore_errors=True)


class LocalSandbox:
    """One temporary root and its shell. See `Sandbox` for what its methods promise."""

    def __init__(self, tree: FileTree, plan: ImagePlan, config: SandboxConfig) -> None:
        self.tree, self.config = tree, config
        self.id = f"local-{tree.id}"
        self.env = tree.environment(plan)
        self.directory = str(tree.place(plan.workdir)) if plan.workdir.strip("/") else str(tree.root)
        self.shell: Shell | None = None
        self.lock = threading.Lock()
        self.is_closed = False

    def open_shell(self) -> Shell:
        shell = Shell(PipeChannel(self.tree.root, self.env))
        size = self.config.max_file_mb << 10
        setup = f"ulimit -f {size}; cd -- {quote(self.directory)} 2>/dev/null || cd -- {quote(str(self.tree.root))}"
        reply = shell.run(setup, SETUP_TIMEOUT_S, 4000)
        if reply.frame is None or reply.frame.status != 0:
            shell.channel.close()
            raise SandboxCrashed(f"no bash starts in sandbox {self.id}: {reply.capture.text().strip()}")
        return shell

    def run(self, command: str, timeout_s: float) -> ExecResult:
        with self.lock:
            if self.is_closed:
                raise SandboxError(f"sandbox {self.id} is closed")
            if not self.tree.root.is_dir():
                raise SandboxError(f"sandbox {self.id}: {self.tree.root} is gone")
            self.shell = self.shell or self.open_shell()
            shell = self.shell
            reply = shell.run(self.tree.inward(command), timeout_s, self.config.output_cap_bytes)
            exit_code, timed_out = None, False
            if reply.frame is not None:
                self.directory, exit_code = reply.frame.directory, reply.frame.status
            elif reply.ended:
                exit_code = shell.channel.exit_code()
            else:
                timed_out = True
                self.kill_command(shell)
            if reply.frame is None or reply.frame.is_gone:
                self.shell = None
                shell.channel.close()
            return result(reply, exit_code, timed_out, self.tree.outward)

    def kill_command(self, shell: Shell) -> None:
        frame = shell.frame
        assert frame is not None, "the set-up command has ended before any other begins"
        with contextlib.suppress(OSError):
            self.directory = directory_of(frame.shell_pid)
        end_processes(self.tree.id, frame.shell_pid, frame.processes - {frame.shell_pid})

    def put_files(self, files: Mapping[str, bytes | Path], destination: str) -> None:
        for name, source in files.items():
            self.tree.write(f"{destination.rstrip('/')}/{checked_name(name)}", read_entry(source))

    def get_artifacts(self, paths: Sequence[str]) -> Artifacts:
        return self.tree.collect(paths, self.config)

    def alive(self) -> bool:
        return not self.is_closed

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.tree.remove()
        if self.shell is not None:
            self.shell.channel.close()


class LocalSandboxes:
    """Makes subprocess sandboxes; thread-safe. Removes what is still open when it is closed."""

    kind = SandboxKind.local

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.open: weakref.WeakValueDictionary[str, LocalSandbox] = weakref.WeakValueDictionary()

    def create(self, task: Task, *, role: str, run_id: str, attempt_id: str) -> LocalSandbox:
        plan = without_build(task, plan_agent(task, self.config))
        tree = self.tree(task, plan, role, run_id, attempt_id)
        try:
            tree.prepare(plan)
            sandbox = LocalSandbox(tree, plan, self.config)
            sandbox.shell = sandbox.open_shell()
        except OSError as error:
            tree.remove()
            raise SandboxError(f"local sandbox {tree.id}: {error}") from error
        self.open[sandbox.id] = sandbox
        return sandbox

    def run_once(
        self,
        task: Task,
        *,
        run_id: str,
        attempt_id: str,
        artifacts: Artifacts,
        files: Mapping[str, Path],
        command: Sequence[str],
        env: Mapping[str, str],
        timeout_s: float,
        collect: str,
    ) -> OneShot:
        plan = without_build(task, plan_verifier(task, self.config))
        plan.env.update(env)
        tree = self.tree(task, plan, "verifier", run_id, attempt_id)
        try:
            for path in [*plan.directories, *artifacts.directories, collect]:
                tree.place(path).mkdir(parents=True, exist_ok=True)
            for file in artifacts.files:
                tree.write(file.path, Entry(content=file.content, mode=file.mode))
            tree.prepare(plan)
            for path, source in files.items():
                tree.write(path, Entry(content=self.script(tree, source), mode=0o555))
            started = time.monotonic()
            exit_code = self.execute(tree, plan, command, timeout_s)
            return OneShot(
                exit_code=exit_code,
                timed_out=exit_code is None,
                duration_s=time.monotonic() - started,
                artifacts=tree.collect([collect], self.config),
            )
        except OSError as error:
            raise SandboxError(f"local sandbox {tree.id}: {error}") from error
        finally:
            tree.remove()

    def script(self, tree: FileTree, source: Path) -> bytes:
        """A trusted file with the task's paths replaced; binary files stay as they are."""
        content = source.read_bytes()
        with contextlib.suppress(UnicodeDecodeError):
            return tree.inward(content.decode("utf-8")).encode("utf-8")
        return content

    def execute(self, tree: FileTree, plan: ImagePlan, command: Sequence[str], timeout_s: float) -> int | None:
        """The exit code, None after the time limit; nothing runs any more afterwards."""
        workdir = tree.place(plan.workdir) if plan.workdir.strip("/") else tree.root
        workdir.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            [tree.inward(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=workdir,
            env=tree.environment(plan),
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=timeout_s)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_processes(tree.id)
            process.kill()
            process.wait()

    def tree(self, task: Task, plan: ImagePlan, role: str, run_id: str, attempt_id: str) -> FileTree:
        absolute = [plan.workdir, *plan.directories, *plan.files, *task.config.artifacts]
        first = {PurePosixPath(path).parts[1] for path in absolute if len(PurePosixPath(path).parts) > 1}
        owner = labels(
            run_id=run_id, attempt_id=attempt_id, role=role, driver=self.config.driver, lease_s=self.config.lease_s
        )
        return FileTree(owner, sorted({*OWN_FOLDERS, *first}))

    def close(self) -> None:
        for sandbox in list(self.open.values()):
            sandbox.close()


def without_build(task: Task, plan: ImagePlan) -> ImagePlan:
    """Raises:
    TaskError: the environment needs an image build, which only Docker can do.
    """
    if plan.context is not None:
        raise TaskError(f"{plan.context / 'Dockerfile'}: {task.id} needs an image build; use sandbox=docker")
    return plan
