"""burnish doctor: what it says of this machine, of one that lacks something, and of probes that break or hang."""

import json
import time

import pytest

from burnish.configs import doctor
from burnish.configs.cli import main
from burnish.configs.config import DoctorRun
from burnish.configs.doctor import PROBES, examine
from burnish.configs.probes import engine, machine, software
from burnish.configs.probes.finding import Probe, Status, fail, ok, warn
from burnish.envs.config import SandboxKind
from burnish.envs.sandbox.lease import driver_identity

NAMES = ["python", "packages", "torch", "ray", "tokenizer", "gpu", "cores", "memory", "disk", "inodes", "runs", "clock",
         "engine", "image", "confinement", "container", "leftovers"]  # fmt: skip
CLOSED = "tcp://127.0.0.1:9"


def test_this_machine_in_both_forms(tmp_path, capsys):
    words = ["doctor", "sandbox=local", f"runs={tmp_path / 'runs'}", "timeout_s=60"]
    code = main([*words, "json=true"])
    found = json.loads(capsys.readouterr().out)
    assert [probe["name"] for probe in found["probes"]] == NAMES
    assert found["ok"] == (code == 0)
    status = {probe["name"]: probe["status"] for probe in found["probes"]}
    # what the tests themselves could not run without
    for name in ("python", "torch", "ray", "tokenizer", "runs", "engine"):
        assert status[name] == "ok", found
    assert not any(probe["needed"] for probe in found["probes"] if probe["name"] in ("gpu", "engine", "leftovers"))
    assert not (tmp_path / "runs").exists(), "looking leaves nothing behind"
    assert list(tmp_path.iterdir()) == []


def test_a_line_a_probe_and_a_sum(monkeypatch, capsys):
    probes = (
        Probe(name="one", ask=lambda run: ok("fine")),
        Probe(name="three", ask=lambda run: warn("old", "renew it")),
        Probe(name="extra", ask=lambda run: fail("gone", "get one"), is_needed=lambda run: False),
    )
    monkeypatch.setattr(doctor, "PROBES", probes)
    assert doctor.main(DoctorRun()) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok    one    fine",
        "warn  three  old -> renew it",
        "FAIL  extra  gone -> get one",
        "1 ok, 1 warnings, 1 failed: the quickstart can run here",
    ]
    monkeypatch.setattr(doctor, "PROBES", (*probes, Probe(name="must", ask=lambda run: fail("gone", "get one"))))
    assert doctor.main(DoctorRun()) == 1
    assert "the quickstart cannot run here" in capsys.readouterr().out


def test_a_probe_that_breaks_or_hangs_is_a_fail_and_the_others_speak():
    def breaks(run):
        raise KeyError("no such\nthing")

    probes = (
        Probe(name="breaks", ask=breaks),
        Probe(name="hangs", ask=lambda run: time.sleep(60) or ok("")),
        Probe(name="works", ask=lambda run: ok("fine")),
    )
    began = time.monotonic()
    answers = {answer.name: answer.finding for answer in examine(DoctorRun(timeout_s=0.2), probes)}
    assert time.monotonic() - began < 10
    assert (answers["breaks"].status, answers["hangs"].status) == (Status.fail, Status.fail)
    assert "KeyError: 'no such\\nthing'" in answers["breaks"].there
    assert answers["hangs"].there == "no answer within 0.2 s"
    assert answers["works"] == ok("fine")


@pytest.mark.parametrize(("sandbox", "code", "status"), [("auto", 0, "warn"), ("docker", 1, "FAIL")])
def test_without_an_engine(monkeypatch, capsys, sandbox, code, status):
    about = ("engine", "image", "confinement", "container", "leftovers")
    monkeypatch.setattr(doctor, "PROBES", tuple(probe for probe in PROBES if probe.name in about))
    assert main(["doctor", f"sandbox={sandbox}", f"engine_url={CLOSED}"]) == code
    lines = dict(zip(about, capsys.readouterr().out.splitlines(), strict=False))
    assert lines["engine"].startswith(f"{status:<4}  engine       none answers at {CLOSED} -> start it")
    for name in about[1:4]:
        assert lines[name].startswith(f"{status:<4}  {name}"), lines[name]
        assert "no engine answers" in lines[name]
    assert "containers not looked at" in lines["leftovers"]


def test_a_missing_package_and_another_version(monkeypatch):
    versions = software.installed
    monkeypatch.setattr(software, "installed", lambda name: None if name == "docker" else versions(name))
    found = software.packages(DoctorRun())
    assert (found.status, "docker missing (needed: <8,>=7)" in found.there) == (Status.fail, True)
    assert "make setup" in found.todo
    monkeypatch.setattr(software, "installed", lambda name: "8.0" if name == "docker" else versions(name))
    assert software.packages(DoctorRun()).status is Status.fail
    monkeypatch.setattr(software, "installed", lambda name: "7.99" if name == "docker" else versions(name))
    found = software.packages(DoctorRun())
    pin = software.pinned(software.CONSTRAINTS.read_text())["docker"]
    assert (found.status, f"docker 7.99 (pinned: {pin})" in found.there) == (Status.warn, True)


def test_what_only_an_extra_or_another_machine_needs_is_not_missing(monkeypatch):
    needs = ["docker>=7", 'burnish-none>=1; extra == "games"', 'burnish-none; sys_platform == "win32"']
    monkeypatch.setattr(software.importlib.metadata, "requires", lambda name: needs)
    assert [need.name for need in software.requirements()] == ["docker"]
    assert software.packages(DoctorRun()).status is not Status.fail


def test_a_wheel_without_constraints_is_held_to_its_requirements(monkeypatch, tmp_path):
    monkeypatch.setattr(software, "CONSTRAINTS", tmp_path / "none")
    found = software.packages(DoctorRun())
    assert (found.status, "requirements hold" in found.there) == (Status.ok, True)


def test_a_library_that_does_not_load_says_why():
    with pytest.raises(RuntimeError, match="ModuleNotFoundError: No module named 'burnish_nothing'"):
        software.in_python("import burnish_nothing", 30)


@pytest.mark.parametrize(
    ("report", "status", "says"),
    [
        ({"cuda": None, "gpus": 0, "gloo": True, "cpu": "AVX2"}, Status.ok, "CPU build"),
        ({"cuda": None, "gpus": 0, "gloo": False, "cpu": "AVX2"}, Status.fail, "without gloo"),
        ({"cuda": None, "gpus": 0, "gloo": True, "cpu": "DEFAULT"}, Status.warn, "CPU code for DEFAULT"),
        ({"cuda": "12.8", "gpus": 2, "gloo": True, "cpu": "AVX2"}, Status.ok, "CUDA 12.8 build, 2 GPUs"),
    ],
)
def test_what_is_said_of_a_torch_build(monkeypatch, report, status, says):
    monkeypatch.setattr(software, "in_python", lambda code, timeout: json.dumps({"version": "2.13.0"} | report))
    monkeypatch.setattr(software.shutil, "which", lambda name: None)
    found = software.torch(DoctorRun())
    assert (found.status, says in found.there) == (status, True)


def test_a_gpu_that_torch_does_not_see(monkeypatch):
    report = {"version": "2.13.0", "cuda": None, "gpus": 0, "gloo": True, "cpu": "AVX2"}
    monkeypatch.setattr(software, "in_python", lambda code, timeout: json.dumps(report))
    monkeypatch.setattr(software.shutil, "which", lambda name: f"/usr/bin/{name}")
    found = software.torch(DoctorRun())
    assert (found.status, "install a CUDA build" in found.todo) == (Status.warn, True)


@pytest.mark.parametrize(("free", "status"), [(2 << 40, "ok"), (2 << 30, "warn"), (1 << 20, "FAIL")])
def test_disk_and_files(monkeypatch, tmp_path, free, status):
    from collections import namedtuple

    usage, files = namedtuple("usage", "total used free"), namedtuple("files", "f_files f_favail")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage(0, 0, free))
    assert machine.disk(DoctorRun(runs=str(tmp_path))).status.value == status
    left = {"ok": 10**6, "warn": 50_000, "FAIL": 100}[status]
    monkeypatch.setattr(machine.os, "statvfs", lambda path: files(10**7, left))
    assert machine.inodes(DoctorRun(runs=str(tmp_path))).status.value == status
    monkeypatch.setattr(machine.os, "statvfs", lambda path: files(0, 0))
    assert machine.inodes(DoctorRun(runs=str(tmp_path))) == ok("not counted by this file system")


@pytest.mark.parametrize(("count", "status"), [(1, Status.fail), (2, Status.ok)])
def test_cores(monkeypatch, count, status):
    monkeypatch.setattr(machine.os, "cpu_count", lambda: count)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(count)))
    found = machine.cores(DoctorRun())
    assert found.status is status
    assert ("cluster.num_cpus=2" in found.todo) == (status is Status.fail)


def test_memory_is_that_of_the_container_around(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "CGROUP_MEMORY", (limit,))
    limit.write_text(f"{1 << 30}\n")
    found = machine.memory(DoctorRun())
    assert (found.status, "1.0 of 1.0 GiB" in found.there) == (Status.fail, True)
    limit.write_text("max\n")
    assert "of 1.0 GiB" not in machine.memory(DoctorRun()).there


def test_a_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "runs", "/proc/burnish"):
        found = machine.runs(DoctorRun(runs=str(path)))
        assert (found.status, "runs=DIR" in found.todo) == (Status.fail, True)
    assert file.read_text() == "mine"


def test_a_clock_that_is_wrong(monkeypatch):
    monkeypatch.setattr(machine, "engine_skew", lambda run: 61.0)
    found = machine.clock(DoctorRun())
    assert (found.status, "engine's differs by +61 s" in found.there) == (Status.warn, True)
    monkeypatch.setattr(machine, "CLOCK_SLACK_S", -1e12)
    assert "before this code was written" in machine.clock(DoctorRun()).there


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["timeout_s=0"], "timeout_s must be > 0 seconds, got 0"),
        (["sandbox=podman"], "sandbox: expected auto|docker|local"),
    ],
)
def test_settings_that_nothing_could_be_asked_with(words, says, capsys):
    assert main(["doctor", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.docker
def test_with_an_engine():
    run = DoctorRun(sandbox=SandboxKind.docker, timeout_s=60)
    about = [probe for probe in PROBES if probe.name in ("engine", "image", "confinement", "container", "clock")]
    answers = {answer.name: answer.finding for answer in examine(run, about)}
    assert {name: finding.status for name, finding in answers.items()} == dict.fromkeys(answers, Status.ok)
    assert answers["engine"].there.startswith("Docker ")
    assert "no network, no new privileges, system calls filtered" in answers["container"].there


@pytest.mark.docker
def test_a_container_of_a_dead_driver_is_seen():
    run = DoctorRun(sandbox=SandboxKind.docker, timeout_s=60)
    client = engine.reached(run)
    host, boot, space, _, started = driver_identity().split("/")
    labels = {
        "burnish": "1",
        "burnish.run": "doctor-test",
        "burnish.driver": f"{host}/{boot}/{space}/4194304/{started}",
    }
    made = client.create_container("burnish-base:1", command=["true"], labels=labels)["Id"]
    try:
        found = engine.leftovers(run)
        assert (found.status, "container: " in found.there) == (Status.warn, True)
        assert "burnish reap" in found.todo
    finally:
        client.remove_container(made, force=True)
        client.close()
