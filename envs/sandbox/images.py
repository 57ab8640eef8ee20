"""From a task's environment to what a sandbox starts from: an image, a directory, variables and files.

A Dockerfile of FROM, WORKDIR, ENV and COPY alone needs no build: its files are written into a container of the base image,
which takes milliseconds. Anything else is built once, under a tag that is the hash of its build context.
"""

import glob
import json
import re
import shlex
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from burnish.envs.config import SandboxConfig
from burnish.envs.sandbox.archive import Entry, read_entry
from burnish.envs.sandbox.base import SandboxError
from burnish.envs.task import EnvironmentConfig, Task, TaskError

DIRECTIVE = re.compile(r"#\s*(escape|check)\s*=", re.IGNORECASE)
REPOSITORY = "burnish-task"
BUILD_LOCKS: dict[str, threading.Lock] = {}
BUILD_LOCKS_GUARD = threading.Lock()


@dataclass(kw_only=True)
class ImagePlan:
    """What a container starts from. `context` is set when `image` has to be built from it first."""

    image: str
    workdir: str
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, Entry] = field(default_factory=dict)
    """By absolute path."""
    directories: list[str] = field(default_factory=list)
    context: Path | None = None


def plan_agent(task: Task, config: SandboxConfig) -> ImagePlan:
    """Where the agent works: `environment.docker_image`, or environment/Dockerfile."""
    return plan(task.environment_dir, task.config.environment, config)


def plan_verifier(task: Task, config: SandboxConfig) -> ImagePlan:
    """Where the tests run: `verifier.environment.docker_image`, tests/Dockerfile, or else the image that the agent's
    environment starts FROM: none of the files copied over it, which the agent may have been told to delete or change.
    """
    own = task.config.verifier_environment or EnvironmentConfig(
        workdir=task.config.environment.workdir,
        cpus=task.config.environment.cpus,
        memory_mb=task.config.environment.memory_mb,
    )
    if own.docker_image is not None or (task.tests_dir / "Dockerfile").is_file():
        return plan(task.tests_dir, own, config)
    base = plan_agent(task, config)
    return ImagePlan(
        image=base.image,
        workdir=base.workdir,
        env={**base.env, **own.env},
        directories=[base.workdir],
        context=base.context,
    )


def plan(context: Path, environment: EnvironmentConfig, config: SandboxConfig) -> ImagePlan:
    dockerfile = context / "Dockerfile"
    if environment.docker_image is not None:
        made = ImagePlan(image=environment.docker_image, workdir=config.workdir)
    else:
        made = plan_dockerfile(dockerfile, config) or ImagePlan(
            image=f"{REPOSITORY}:{hash_context(context)}", workdir="", context=context
        )
    made.env.update(environment.env)
    if environment.workdir is not None:
        made.workdir = environment.workdir
    return made


def hash_context(context: Path) -> str:
    digest = sha256()
    for path in sorted(path for path in context.rglob("*") if path.is_file()):
        entry = read_entry(path)
        digest.update(f"{path.relative_to(context).as_posix()}\0{entry.mode:o} {len(entry.content)}\0".encode())
        digest.update(entry.content)
    return digest.hexdigest()[:40]


def instructions(text: str) -> list[tuple[str, str]] | None:
    """(INSTRUCTION, rest) of a Dockerfile, None when it uses a form that only the builder reads."""
    found: list[tuple[str, str]] = []
    pending = ""
    for line in text.splitlines():
        if not pending and DIRECTIVE.match(line):
            return None
        if line.lstrip().startswith("#") or not line.strip():
            continue
        pending += line
        if pending.rstrip().endswith("\\"):
            pending = pending.rstrip()[:-1] + " "
            continue
        name, _, rest = pending.strip().partition(" ")
        found.append((name.upper(), rest.strip()))
        pending = ""
    return None if pending or any("<<" in rest or "$" in rest for _, rest in found) else found


def plan_dockerfile(dockerfile: Path, config: SandboxConfig) -> ImagePlan | None:
    """The plan of a Dockerfile that needs no build, else None.

    Raises:
        TaskError: it copies a file that is not in the build context.
    """
    steps = instructions(dockerfile.read_text("utf-8"))
    if (
        not steps
        or steps[0][0] != "FROM"
        or len(steps[0][1].split()) != 1
        or (dockerfile.parent / ".dockerignore").exists()
    ):
        return None
    made = ImagePlan(image=steps[0][1], workdir=config.workdir)
    for name, rest in steps[1:]:
        if name == "WORKDIR" and rest and not rest.startswith(('"', "'")):
            made.workdir = str(PurePosixPath(made.workdir if has_workdir(made) else "/") / rest)
            made.directories.append(made.workdir)
        elif name == "ENV" and (pairs := environment_pairs(rest)):
            made.env.update(pairs)
        elif name == "COPY" and (words := copy_words(rest)):
            if not add_copy(made, dockerfile, words):
                return None
        else:
            return None
    return made


def has_workdir(made: ImagePlan) -> bool:
    return bool(made.directories)


def environment_pairs(rest: str) -> dict[str, str]:
    """NAME=value ..., or the old form NAME value; empty when neither."""
    try:
        words = shlex.split(rest)
    except ValueError:
        return {}
    if words and "=" in words[0]:
        return dict(word.split("=", 1) for word in words) if all("=" in word for word in words) else {}
    name, _, value = rest.partition(" ")
    return {name: value.strip()} if value.strip() else {}


def copy_words(rest: str) -> list[str]:
    """Sources and destination, empty when COPY has flags or patterns."""
    if rest.startswith("["):
        try:
            words = json.loads(rest)
        except ValueError:
            return []
    else:
        words = rest.split()
    is_plain = len(words) >= 2 and all(
        isinstance(word, str) and not word.startswith("--") and word == glob.escape(word) and "\\" not in word
        for word in words
    )
    return words if is_plain else []


def add_copy(made: ImagePlan, dockerfile: Path, words: list[str]) -> bool:
    """Adds one COPY to the plan; False when only the builder knows what it means."""
    *sources, target = words
    into = PurePosixPath(made.workdir if has_workdir(made) else "/") / target
    if ".." in into.parts:
        return False
    for source in sources:
        path = dockerfile.parent / source.lstrip("/")
        if ".." in PurePosixPath(source).parts or not path.exists():
            raise TaskError(f"{dockerfile}: COPY {source}: no such file in {dockerfile.parent}")
        if path.is_dir():
            made.directories.append(str(into))
            for inner in sorted(path.rglob("*")):
                place = str(into / inner.relative_to(path).as_posix())
                if inner.is_dir():
                    made.directories.append(place)
                else:
                    made.files[place] = read_entry(inner)
        elif target.endswith("/") or target in (".", "..") or len(sources) > 1 or str(into) in made.directories:
            made.files[str(into / path.name)] = read_entry(path)
        else:
            made.files[str(into)] = read_entry(path)
    return True


def ensure_image(client: Any, plan: ImagePlan, timeout_s: float) -> None:
    """Builds the plan's image unless it is there; one thread of this process builds a tag at a time.

    Raises:
        SandboxError: the build failed, or an image that is not built here is missing.
    """
    import docker.errors

    with BUILD_LOCKS_GUARD:
        lock = BUILD_LOCKS.setdefault(plan.image, threading.Lock())
    with lock:
        try:
            client.inspect_image(plan.image)
            return
        except docker.errors.ImageNotFound:
            pass
        if plan.context is None:
            hint = "; run `make setup`" if plan.image.startswith("burnish-base") else "; load or build it first"
            raise SandboxError(f"image {plan.image} is not on this machine{hint}")
        tail: list[str] = []
        # a RUN that installs something needs the host's network; --force-rm, or failed builds leave containers
        for event in client.build(
            path=str(plan.context), tag=plan.image, rm=True, forcerm=True, decode=True, network_mode="host",
            labels={"burnish": "1"}, timeout=int(timeout_s) + 1,
        ):  # fmt: skip
            tail = [*tail, str(event.get("stream") or event.get("error") or "")[:2000]][-20:]
            if "error" in event:
                raise SandboxError(f"{plan.context / 'Dockerfile'}: the build failed: {''.join(tail).strip()[-2000:]}")


def setup_script(files: Mapping[str, Entry], directories: list[str]) -> str:
    """Bash text that writes the files with builtins, which costs no process but for mkdir and chmod."""
    folders = sorted({*directories, *(str(PurePosixPath(path).parent) for path in files)} - {"/"})
    steps = ["[ -s /etc/hosts ] || printf '127.0.0.1\\tlocalhost\\n::1\\tlocalhost\\n' > /etc/hosts"]
    if folders:
        steps.append("mkdir -p -- " + " ".join(map(shlex.quote, folders)))
    modes: dict[int, list[str]] = {}
    for path, entry in files.items():
        steps.append(f"printf -- '{octal(entry.content)}' > {shlex.quote(path)}")
        if entry.mode != 0o644:
            modes.setdefault(entry.mode, []).append(path)
    steps += [f"chmod {mode:o} -- {' '.join(map(shlex.quote, paths))}" for mode, paths in sorted(modes.items())]
    return " && ".join(steps)


PLAIN_BYTES = frozenset(map(ord, ' !"#$&()*+,-./:;<=>?@[]^_`{|}~')) | frozenset(
    byte for byte in range(128) if chr(byte).isalnum()
)
ESCAPES = {byte: chr(byte) if byte in PLAIN_BYTES else f"\\{byte:03o}" for byte in range(256)} | {0x25: "%%"}


def octal(content: bytes) -> str:
    """`content` as a single-quoted format of bash's printf."""
    return "".join(map(ESCAPES.__getitem__, content))
