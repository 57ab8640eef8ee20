"""One task: a folder in Harbor's format, checked strictly before anything runs.

This release runs single-step Linux tasks whose tests run in a container of their own (`verifier.environment_mode =
"separate"`). Whatever it cannot honour is refused, never ignored. A task that names no network mode gets no network.
"""

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from burnish.envs.errors import UserError
from burnish.envs.task_schema import faults, parse_size_mb

MAX_FILES = 10_000
MAX_BYTES = 64 << 20
MAX_INSTRUCTION_BYTES = 1 << 20
ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
CANARY_PATTERN = re.compile(
    r"(?:<!--(?:(?!-->).)*canary(?:(?!-->).)*-->|#[^\n]*canary[^\n]*)\s*", re.IGNORECASE | re.DOTALL
)
DEFAULT_ARTIFACTS = ("/logs/artifacts",)
# what the agent left may never replace the tests, the result, or the programs that grade it
NO_ARTIFACTS_IN = ("/tests", "/solution", "/logs/verifier", "/logs/agent")
NO_ARTIFACTS_IN += ("/proc", "/sys", "/dev", "/run", "/var/run", "/etc", "/boot")
NO_ARTIFACTS_IN += ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


class TaskError(UserError):
    """A task folder is not what it should be; names the file and the key."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """`[environment]` or `[verifier.environment]`; None leaves a limit to the sandbox's own settings."""

    docker_image: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    """Largest file a process may write; the engine enforces no quota on the whole disk."""
    build_timeout_s: float = 600.0
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What `task.toml` says, with Harbor's defaults."""

    agent_timeout_s: float | None = None
    """Wall clock of the agent; None leaves it to the episode's budget."""
    verifier_timeout_s: float = 600.0
    artifacts: tuple[str, ...] = DEFAULT_ARTIFACTS
    """Absolute paths: all that crosses from the agent to the tests."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    verifier_environment: EnvironmentConfig | None = None
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    solution_env: Mapping[str, str] = field(default_factory=dict)
    reward_range: tuple[float, float] = (0.0, 1.0)
    """`metadata.reward_range`: rewards outside it are no verdict."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A checked task folder."""

    id: str
    """The folder's name."""
    path: Path
    instruction: str
    """instruction.md without canary lines."""
    config: TaskConfig
    content_hash: str
    """sha256 over sorted (relative path, bytes) of every file in the folder."""

    @property
    def where(self) -> str:
        """Where it can be looked up, for messages."""
        return str(self.path)

    @property
    def environment_dir(self) -> Path:
        return self.path / "environment"

    @property
    def tests_dir(self) -> Path:
        return self.path / "tests"

    @property
    def solution_dir(self) -> Path:
        return self.path / "solution"

    def solution_lines(self) -> list[str]:
        """Commands of solution/solve.sh, one a line, without comments, blank lines and the #! line.

        Raises:
            TaskError: the task has no solution, or nothing in it is a command.
        """
        script = self.solution_dir / "solve.sh"
        if not script.is_file():
            raise TaskError(f"{script}: the task has no oracle solution")
        try:
            lines = script.read_text("utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise TaskError(f"{script}: not UTF-8 at byte {error.start}") from None
        commands = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not commands:
            raise TaskError(f"{script}: no command in it")
        return commands


def load_task(path: Path) -> Task:
    """Reads and checks one task folder.

    Raises:
        TaskError: naming the file and the key; nothing of the folder has been run.
    """
    path = Path(path)
    if not path.is_dir():
        raise TaskError(f"{path}: no such task folder")
    task_id = path.resolve().name
    if not ID_PATTERN.fullmatch(task_id):
        raise TaskError(f"{path}: a task folder's name holds letters, digits, '.', '_' and '-' only, at most 128")
    files = walk(path)
    config = load_config(path / "task.toml", files)
    check_layout(path, files, config)
    return Task(
        id=task_id,
        path=path.resolve(),
        instruction=read_instruction(path / "instruction.md"),
        config=config,
        content_hash=hash_files(files),
    )


def walk(root: Path) -> dict[str, Path]:
    """Every file below `root` by relative path, links resolved.

    Raises:
        TaskError: a link leaves the folder or runs in a circle, something is not a regular file, too many or too large.
    """
    inside = root.resolve()
    found: dict[str, Path] = {}
    size = 0
    pending = [(root, frozenset({inside}))]
    while pending:
        folder, parents = pending.pop()
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path = Path(entry.path)
            try:
                status = path.stat()
            except OSError:
                raise TaskError(f"{path}: a link that leads nowhere or in a circle") from None
            if entry.is_symlink() and not path.resolve().is_relative_to(inside):
                raise TaskError(f"{path}: the link points outside the task folder")
            if stat.S_ISDIR(status.st_mode):
                target = path.resolve()
                if target in parents:
                    raise TaskError(f"{path}: the link leads back to a folder it is in")
                pending.append((path, parents | {target}))
                continue
            if not stat.S_ISREG(status.st_mode):
                raise TaskError(f"{path}: neither a regular file nor a folder")
            size += status.st_size
            found[path.relative_to(root).as_posix()] = path
            if len(found) > MAX_FILES or size > MAX_BYTES:
                raise TaskError(f"{root}: more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB")
    return found


def hash_files(files: Mapping[str, Path]) -> str:
    digest = sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode("utf-8", "surrogateescape") + content)
    return digest.hexdigest()


def load_config(path: Path, files: Mapping[str, Path]) -> TaskConfig:
    """Raises:
    TaskError: the file is missing, is not TOML, or a key is unknown, wrong, out of range or not supported yet.
    """
    if "task.toml" not in files:
        raise TaskError(
            f"{path}: missing; a task folder holds task.toml, instruction.md, environment/ and tests/test.sh"
        )
    try:
        table = tomllib.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: not UTF-8 at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{path}: not TOML: {error}") from None
    for fault in faults(table):
        raise TaskError(f"{path}: {fault}")
    verifier = table.get("verifier", {})
    if verifier.get("environment_mode") is None and "environment" not in verifier:
        raise TaskError(
            f'{path}: verifier.environment_mode is not set, which means "shared" in Harbor: the agent could write its own '
            'reward. Burnish runs environment_mode = "separate"; list what the tests may see in `artifacts`'
        )
    metadata = table.get("metadata", {})
    own = verifier.get("environment")
    return TaskConfig(
        agent_timeout_s=optional_float(table.get("agent", {}).get("timeout_sec")),
        verifier_timeout_s=float(verifier.get("timeout_sec", 600.0)),
        artifacts=artifact_paths(path, table.get("artifacts", list(DEFAULT_ARTIFACTS))),
        environment=environment(path, table.get("environment", {}), "environment"),
        verifier_environment=None if own is None else environment(path, own, "verifier.environment"),
        verifier_env=literal_env(path, verifier.get("env", {}), "verifier.env"),
        solution_env=literal_env(path, table.get("solution", {}).get("env", {}), "solution.env"),
        reward_range=reward_range(path, metadata),
        metadata=metadata,
    )


def optional_float(value: float | None) -> float | None:
    return None if value is None else float(value)


def artifact_paths(path: Path, entries: list[Any]) -> tuple[str, ...]:
    sources: list[str] = []
    for index, entry in enumerate(entries):
        where = f"artifacts[{index}]"
        if isinstance(entry, dict):
            for fault in faults(entry, "artifact", f"{where}."):
                raise TaskError(f"{path}: {fault}")
            if "source" not in entry:
                raise TaskError(f"{path}: {where} has no `source`")
        source = entry["source"] if isinstance(entry, dict) else entry
        pure = PurePosixPath(source)
        if not source.startswith("/") or source.startswith("//") or ".." in pure.parts or "\0" in source:
            raise TaskError(f"{path}: {where} must be an absolute path without '..', got {source!r}")
        refused = [
            part for part in NO_ARTIFACTS_IN if pure.is_relative_to(part) or PurePosixPath(part).is_relative_to(pure)
        ]
        if refused:
            raise TaskError(
                f"{path}: {where} = {source!r} would let the agent's files into {refused[0]} of the verifier"
            )
        sources.append(str(pure))
    if not sources:
        raise TaskError(f"{path}: artifacts is empty, so the tests could see nothing the agent did")
    return tuple(dict.fromkeys(sources))


def environment(path: Path, table: Mapping[str, Any], name: str) -> EnvironmentConfig:
    sizes: dict[str, int | None] = {}
    for legacy, current in (("memory", "memory_mb"), ("storage", "storage_mb")):
        sizes[current] = table.get(current)
        if legacy in table:
            sizes[current] = parse_size_mb(table[legacy])
            if sizes[current] is None:
                raise TaskError(f'{path}: {name}.{legacy} must be a size such as "2G", got {table[legacy]!r}')
            if current in table:
                raise TaskError(f"{path}: {name}.{legacy} and {name}.{current} are both set")
    workdir = table.get("workdir")
    if workdir is not None and (not workdir.startswith("/") or ".." in PurePosixPath(workdir).parts):
        raise TaskError(f"{path}: {name}.workdir must be an absolute path without '..', got {workdir!r}")
    image = table.get("docker_image")
    if image is not None and not re.fullmatch(r"[A-Za-z0-9][\w.:/@-]*", image):
        raise TaskError(f"{path}: {name}.docker_image is not the name of an image: {image!r}")
    return EnvironmentConfig(
        docker_image=image,
        cpus=optional_float(table.get("cpus")),
        memory_mb=sizes["memory_mb"],
        storage_mb=sizes["storage_mb"],
        build_timeout_s=float(table.get("build_timeout_sec", 600.0)),
        workdir=workdir,
        env=literal_env(path, table.get("env", {}), f"{name}.env"),
    )


def literal_env(path: Path, table: Mapping[str, str], name: str) -> dict[str, str]:
    for key, value in table.items():
        if "${" in value:
            raise TaskError(
                f"{path}: {name}.{key} takes a value from the host ({value!r}), which Burnish does not run yet"
            )
    return dict(table)


def reward_range(path: Path, metadata: Mapping[str, Any]) -> tuple[float, float]:
    given = metadata.get("reward_range", [0.0, 1.0])
    is_pair = isinstance(given, list) and len(given) == 2
    if not is_pair or not all(isinstance(v, int | float) and abs(v) <= 1e6 for v in given) or not given[0] < given[1]:
        raise TaskError(f"{path}: metadata.reward_range must be [low, high] with low < high, got {given!r}")
    return float(given[0]), float(given[1])


def check_layout(path: Path, files: Mapping[str, Path], config: TaskConfig) -> None:
    """Raises:
    TaskError: a file is missing, or belongs to a kind of task that is not supported yet.
    """
    if "instruction.md" not in files:
        raise TaskError(f"{path / 'instruction.md'}: missing")
    if "tests/test.sh" not in files:
        kind = ": Windows tasks are not supported" if "tests/test.bat" in files else ""
        raise TaskError(f"{path / 'tests/test.sh'}: missing{kind}")
    if "environment/Dockerfile" not in files and config.environment.docker_image is None:
        raise TaskError(f"{path / 'environment/Dockerfile'}: missing, and environment.docker_image is not set")
    if "environment/Dockerfile" in files:
        check_dockerfile(path / "environment/Dockerfile")
    if b"\r\n" in (path / "tests/test.sh").read_bytes():
        raise TaskError(
            f"{path / 'tests/test.sh'}: Windows line ends, which bash takes for text; convert it (dos2unix)"
        )
    later = ("trajectory.json", "steps", "environment/docker-compose.yaml", "tests/docker-compose.yaml")
    later += ("tests/.harborignore", "solution/.harborignore")
    for name in later:
        if (path / name).exists():
            raise TaskError(f"{path / name}: valid Harbor, but Burnish does not run it yet")


def check_dockerfile(path: Path) -> None:
    """Raises:
    TaskError: it is not text, or does not begin with FROM (ARG and comments may stand before it).
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: not UTF-8 at byte {error.start}") from None
    first = next((line.split() for line in lines if line.strip() and not line.lstrip().startswith("#")), [""])
    if first[0].upper() not in ("FROM", "ARG"):
        raise TaskError(f"{path}: must begin with FROM, got {first[0]!r}")


def read_instruction(path: Path) -> str:
    """The text the agent sees: leading canary comments and the blank lines after them removed.

    Raises:
        TaskError: empty, too long, or not plain UTF-8 text.
    """
    data = path.read_bytes()
    if len(data) > MAX_INSTRUCTION_BYTES:
        raise TaskError(f"{path}: longer than {MAX_INSTRUCTION_BYTES >> 10} KiB")
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: not UTF-8 at byte {error.start}") from None
    if "\0" in text:
        raise TaskError(f"{path}: holds a NUL character")
    while match := CANARY_PATTERN.match(text):
        text = text[match.end() :]
    if not text.strip():
        raise TaskError(f"{path}: no instruction in it")
    return text
