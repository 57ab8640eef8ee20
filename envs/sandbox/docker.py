"""Makes sandboxes as Docker containers: no network, few rights, hard limits, labels that say whose they are."""

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import docker
import docker.errors
import docker.types
import docker.utils
import requests.exceptions

from burnish.envs.config import SandboxConfig, SandboxKind
from burnish.envs.sandbox.archive import Entry, pack
from burnish.envs.sandbox.base import Artifacts, OneShot, SandboxError, SandboxUnavailable
from burnish.envs.sandbox.container import DockerSandbox, engine_errors, read_artifacts, remove
from burnish.envs.sandbox.images import ImagePlan, ensure_image, plan_agent, plan_verifier, setup_script
from burnish.envs.sandbox.lease import labels
from burnish.envs.sandbox.seccomp import security_option
from burnish.envs.sandbox.shell import quote
from burnish.envs.task import Task

T = TypeVar("T")
log = logging.getLogger(__name__)

# root in the container keeps what package tools and file owners need; no device, network, module or trace rights
CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"]
# the container's first program only waits. It goes by a name that no `pkill sleep` or `pkill bash` of the agent hits, and
# ignores what a `kill 1` makes init pass on
WAIT = "trap '' HUP INT TERM; printf burnish-wait > /proc/self/comm; while :; do read -r <> <(:); done"
KEEP_ALIVE = ["bash", "--noprofile", "--norc", "-c", WAIT]
# holds the set-up script of a verifier's container. Arguments of its first process could be read by every user inside, and
# with them what the tests expect
SETUP = "BURNISH_SETUP"
SCRIPT_MAX = 48_000
"""Bytes of a set-up script; more goes through the engine's archive call, which costs a process of the engine."""


def connect(engine_url: str, timeout_s: float) -> Any:
    """A client that answers.

    Raises:
        SandboxUnavailable: no engine answers.
    """
    environment = docker.utils.kwargs_from_env()
    if engine_url:
        environment["base_url"] = engine_url
    try:
        return docker.APIClient(version="auto", timeout=ceil(timeout_s), max_pool_size=128, **environment)
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError):
        where = engine_url or environment.get("base_url") or "the local socket"
        raise SandboxUnavailable(
            f"sandbox=docker needs a Docker engine, but none answers at {where}; start it (`make setup` as root does), "
            "or use sandbox=local."
        ) from None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one container: the task's own, else the configuration's."""

    cpus: float
    memory_mb: int
    max_file_mb: int


class DockerSandboxes:
    """Makes containers through one client; thread-safe. Removes what is still open when it is closed or forgotten."""

    kind = SandboxKind.docker

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.client = connect(config.engine_url, config.start_timeout_s)
        try:
            self.client.inspect_image(config.image)
        except docker.errors.ImageNotFound:
            raise SandboxUnavailable(
                f"sandbox=docker needs the image {config.image}, and the engine does not have it; run `make setup`."
            ) from None
        self.security = security_option(self.client.version().get("Arch", ""))
        self.known_images: set[str] = {config.image}
        self.open: weakref.WeakValueDictionary[str, DockerSandbox] = weakref.WeakValueDictionary()

    def create(self, task: Task, *, role: str, run_id: str, attempt_id: str) -> DockerSandbox:
        return self.across_restart(lambda: self.create_now(task, role=role, run_id=run_id, attempt_id=attempt_id))

    def across_restart(self, call: Callable[[], T]) -> T:
        """`call`, and once more when it failed because the engine was away.

        What the first try could not remove has this driver's labels, and goes with the driver.
        """
        try:
            return call()
        except SandboxError:
            if self.engine_answers():
                raise
            log.warning("the Docker engine does not answer; waiting up to %.0f s for it", self.config.engine_wait_s)
            deadline = time.monotonic() + self.config.engine_wait_s
            while not self.engine_answers():
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
            return call()

    def engine_answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError):
            return False

    def create_now(self, task: Task, *, role: str, run_id: str, attempt_id: str) -> DockerSandbox:
        plan = self.ready(plan_agent(task, self.config), task.config.environment.build_timeout_s)
        script = setup_script(plan.files, plan.directories)
        is_small = len(script) <= SCRIPT_MAX
        owner = self.labels(role, run_id, attempt_id)
        container_id = self.make(plan, self.limits(task), owner, KEEP_ALIVE)
        sandbox = DockerSandbox(self.client, container_id, self.config, plan.workdir)
        try:
            with engine_errors(f"start of a container of {plan.image}"):
                if not is_small:
                    self.client.put_archive(container_id, "/", pack(plan.files, plan.directories))
                self.client.start(container_id)
            sandbox.shell = sandbox.open_shell(script if is_small else setup_script({}, plan.directories))
        except BaseException:
            sandbox.close()
            raise
        self.open[container_id] = sandbox
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
        return self.across_restart(
            lambda: self.run_once_now(
                task,
                run_id=run_id,
                attempt_id=attempt_id,
                artifacts=artifacts,
                files=files,
                command=command,
                env=env,
                timeout_s=timeout_s,
                collect=collect,
            )
        )

    def run_once_now(
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
        plan = self.ready(plan_verifier(task, self.config), task.config.environment.build_timeout_s)
        plan.env.update(env)
        placed = {file.path: Entry(content=file.content, mode=file.mode) for file in artifacts.files}
        for path, source in files.items():
            placed[path] = Entry(content=source.read_bytes(), mode=0o555)
        placed.update(plan.files)
        directories = [*plan.directories, *artifacts.directories, collect]
        script = setup_script(placed, directories)
        is_small = len(script) <= SCRIPT_MAX
        if not is_small:
            script = setup_script({}, directories)
        entry_point = [
            "bash",
            "--noprofile",
            "--norc",
            "-c",
            f'setup=${SETUP}; unset {SETUP}; rm -rf -- {quote(collect)} && eval "$setup" && exec "$@"',
            "bash",
            *command,
        ]
        plan.env[SETUP] = script
        owner = self.labels("verifier", run_id, attempt_id)
        container_id = self.make(plan, self.limits(task, is_verifier=True), owner, entry_point)
        try:
            with engine_errors("start of a verifier's container"):
                if not is_small:
                    self.client.put_archive(container_id, "/", pack(placed, directories))
                started = time.monotonic()
                self.client.start(container_id)
            exit_code = self.wait(container_id, started + timeout_s)
            return OneShot(
                exit_code=exit_code,
                timed_out=exit_code is None,
                duration_s=time.monotonic() - started,
                artifacts=read_artifacts(self.client, container_id, [collect], self.config),
            )
        finally:
            remove(self.client, container_id)

    def wait(self, container_id: str, deadline: float) -> int | None:
        """The exit code; None when the deadline passed, after which nothing in the container runs any more."""
        with engine_errors("waiting for a verifier's container"):
            try:
                return self.client.wait(container_id, timeout=max(0.001, deadline - time.monotonic()))["StatusCode"]
            except (requests.exceptions.ReadTimeout, requests.exceptions.ConnectionError):
                if time.monotonic() < deadline:
                    raise
            with contextlib.suppress(docker.errors.APIError):
                self.client.kill(container_id)
            self.client.wait(container_id, timeout=self.config.start_timeout_s)
        return None

    def ready(self, plan: ImagePlan, build_timeout_s: float) -> ImagePlan:
        if plan.image not in self.known_images:
            with engine_errors(f"image {plan.image}"):
                ensure_image(self.client, plan, min(build_timeout_s, self.config.build_timeout_s))
            self.known_images.add(plan.image)
        return plan

    def labels(self, role: str, run_id: str, attempt_id: str) -> dict[str, str]:
        return labels(
            run_id=run_id,
            attempt_id=attempt_id,
            role=role,
            driver=self.config.driver,
            lease_s=self.config.lease_s,
        )

    def limits(self, task: Task, is_verifier: bool = False) -> Limits:
        own = (task.config.verifier_environment if is_verifier else None) or task.config.environment
        return Limits(
            cpus=own.cpus or self.config.cpus,
            memory_mb=own.memory_mb or self.config.memory_mb,
            max_file_mb=own.storage_mb or self.config.max_file_mb,
        )

    def make(self, plan: ImagePlan, limits: Limits, owner: Mapping[str, str], entry_point: list[str]) -> str:
        """Creates a container, not started."""
        max_file = limits.max_file_mb << 20
        with engine_errors(f"a container of {plan.image}"):
            host = self.client.create_host_config(
                init=True,
                network_mode="none",
                mem_limit=f"{limits.memory_mb}m",
                # equal to mem_limit: no swap
                memswap_limit=f"{limits.memory_mb}m",
                nano_cpus=int(limits.cpus * 1e9),
                pids_limit=self.config.max_processes,
                cap_drop=["ALL"],
                cap_add=CAPABILITIES,
                security_opt=["no-new-privileges", *self.security],
                ulimits=[docker.types.Ulimit(name="fsize", soft=max_file, hard=max_file)],
                # nothing reads it, and a flood would fill the disk
                log_config={"Type": "none"},
            )
            return self.client.create_container(
                plan.image,
                entrypoint=entry_point,
                command=[],
                environment=plan.env,
                working_dir=plan.workdir or None,
                labels=dict(owner),
                host_config=host,
                # an empty network namespace needs no set-up by the engine, which is half the time of a start
                network_disabled=True,
            )["Id"]

    def close(self) -> None:
        for sandbox in list(self.open.values()):
            sandbox.close()
