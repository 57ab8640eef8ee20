"""The strict task loader: what is not understood is refused with file and key, never ignored."""

import os
from hashlib import sha256

import pytest

from burnish.envs.task import TaskError, load_task

SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'


def refused(folder) -> str:
    with pytest.raises(TaskError) as caught:
        load_task(folder)
    message = str(caught.value)
    assert "\n" not in message.split("not TOML")[0], message
    return message


def test_a_full_task_loads_with_harbors_defaults(make_task):
    task = load_task(make_task())
    assert (task.id, task.instruction) == ("say-hello", "Write hello to out.txt\n")
    assert (task.config.agent_timeout_s, task.config.verifier_timeout_s) == (None, 20.0)
    assert task.config.artifacts == ("/app",)
    assert task.solution_lines() == ["echo hello > out.txt"]
    assert (task.tests_dir / "test.sh").is_file()


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.3", "1.4"])
def test_every_schema_in_the_wild_loads(make_task, version):
    load_task(make_task(files={"task.toml": f'version = "{version}"\n{SEPARATE}'}))


def test_every_key_burnish_runs_is_read(make_task):
    text = """
schema_version = "1.4"
source = "unit"
artifacts = ["/app/out.txt", {source = "/logs/artifacts/", service = "main"}]
[task]
name = "burnish/say-hello"
authors = [{name = "A", email = "a@b.c"}]
keywords = ["files"]
[metadata]
difficulty = "easy"
reward_range = [-1, 2.5]
anything = {goes = true}
[agent]
timeout_sec = 90
network_mode = "no-network"
[verifier]
environment_mode = "separate"
timeout_sec = 30.5
user = "root"
env = {MODE = "strict"}
collect = []
[verifier.environment]
docker_image = "burnish-base:1"
memory = "2G"
[environment]
build_timeout_sec = 60
cpus = 0.5
memory_mb = 256
storage_mb = 10
workdir = "/work"
gpus = 0
allow_internet = false
env = {A = "1"}
[solution]
env = {B = "2"}
"""
    config = load_task(make_task(files={"task.toml": text})).config
    assert config.artifacts == ("/app/out.txt", "/logs/artifacts")
    assert config.reward_range == (-1.0, 2.5)
    assert config.agent_timeout_s == 90.0
    assert config.verifier_env == {"MODE": "strict"}
    assert config.verifier_environment is not None
    assert config.verifier_environment.memory_mb == 2048
    assert (config.environment.cpus, config.environment.memory_mb, config.environment.workdir) == (0.5, 256, "/work")
    assert config.solution_env == {"B": "2"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"[agent]\ntimeout_secs = 5\n{SEPARATE}", "unknown key agent.timeout_secs, did you mean agent.timeout_sec?"),
        (f"artefacts = []\n{SEPARATE}", "unknown key artefacts, did you mean artifacts?"),
        # the dialect that Harbor loads as a public network (C-42)
        (f'{SEPARATE}[verifier.network]\nmode = "no-network"\n', "unknown key verifier.network"),
        (f"{SEPARATE}[environment]\nzzz = 1\n", "unknown key environment.zzz; known keys: allow_internet"),
        (f"{SEPARATE}[environment]\ncpus = -1\n", "environment.cpus must be a number from 0.01"),
        (f"{SEPARATE}[environment]\ncpus = 0.001\n", "environment.cpus must be"),
        (f"{SEPARATE}[environment]\ncpus = true\n", "environment.cpus must be"),
        (f"{SEPARATE}[environment]\nmemory_mb = 1.5\n", "environment.memory_mb must be a whole number"),
        (f'{SEPARATE}[environment]\nmemory = "lots"\n', "environment.memory must be a size"),
        (f"{SEPARATE}timeout_sec = 0\n", "verifier.timeout_sec must be a number from 0.001"),
        (f"{SEPARATE}timeout_sec = 1e400\n", "verifier.timeout_sec must be"),
        (f"{SEPARATE}timeout_sec = nan\n", "verifier.timeout_sec must be"),
        (f'{SEPARATE}env = {{A = "${{HOME}}"}}\n', "verifier.env.A takes a value from the host"),
        (f"steps = []\n{SEPARATE}", "steps = [] is valid Harbor, but Burnish does not run it yet"),
        (f'[agent]\nnetwork_mode = "public"\n{SEPARATE}', "agent.network_mode = 'public' is valid Harbor, but"),
        (f'[agent]\nuser = "bob"\n{SEPARATE}', "agent.user = 'bob' is valid Harbor"),
        (f'{SEPARATE}[environment]\nos = "windows"\n', "environment.os = 'windows' is valid Harbor"),
        (f"{SEPARATE}[[verifier.collect]]\ncommand = 'x'\n", "verifier.collect"),
        (f'{SEPARATE}[environment.healthcheck]\ncommand = "x"\n', "environment.healthcheck"),
        ('[verifier]\nenvironment_mode = "shared"\n', "verifier.environment_mode = 'shared' is valid Harbor"),
        ("[agent]\ntimeout_sec = 5\n", 'verifier.environment_mode is not set, which means "shared"'),
        (f'schema_version = "9"\n{SEPARATE}', "schema_version must be one of 1.0"),
        (f"artifacts = []\n{SEPARATE}", "artifacts is empty"),
        (f'artifacts = ["out.txt"]\n{SEPARATE}', "artifacts[0] must be an absolute path"),
        (f'artifacts = ["/app/../etc"]\n{SEPARATE}', "artifacts[0] must be an absolute path"),
        (f'artifacts = ["/"]\n{SEPARATE}', "would let the agent's files into"),
        (f'artifacts = ["/usr/bin"]\n{SEPARATE}', "into /usr of the verifier"),
        (f'artifacts = ["/logs"]\n{SEPARATE}', "into /logs/verifier of the verifier"),
        (f'artifacts = ["/tests/test.sh"]\n{SEPARATE}', "into /tests of the verifier"),
        (f'artifacts = [{{source = "/app", exclude = ["x"]}}]\n{SEPARATE}', "artifacts[0].exclude"),
        (f'artifacts = [{{src = "/app"}}]\n{SEPARATE}', "unknown key artifacts[0].src"),
        (f"{SEPARATE}[metadata]\nreward_range = [1, 0]\n", "metadata.reward_range"),
        ("[agent]\n[agent]\n", "not TOML"),
        ("artifacts = [\n", "not TOML"),
    ],
)
def test_a_wrong_key_is_an_error_that_names_file_and_key(make_task, text, expected):
    message = refused(make_task(files={"task.toml": text}))
    assert "task.toml: " in message
    assert expected in message


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"task.toml": None}, "task.toml: missing"),
        ({"instruction.md": None}, "instruction.md: missing"),
        ({"instruction.md": " \n\n"}, "no instruction"),
        ({"instruction.md": "# BENCHMARK canary 12\n\n"}, "no instruction"),
        ({"instruction.md": "a\0b"}, "NUL"),
        ({"instruction.md": "x" * (2 << 20)}, "longer than 1024 KiB"),
        ({"tests/test.sh": None}, "tests/test.sh: missing"),
        ({"tests/test.sh": None, "tests/test.bat": "x"}, "Windows tasks are not supported"),
        ({"environment/Dockerfile": None}, "environment/Dockerfile: missing, and environment.docker_image is not set"),
        ({"environment/docker-compose.yaml": "x"}, "docker-compose.yaml: valid Harbor, but"),
        ({"trajectory.json": "{}"}, "trajectory.json: valid Harbor, but"),
        ({"steps/one/instruction.md": "x"}, "steps: valid Harbor, but"),
    ],
)
def test_a_missing_or_unsupported_file_is_named(make_task, files, expected):
    assert expected in refused(make_task(files=files))


@pytest.mark.parametrize("name", ["..", "with space", "a" * 200, "-x", "ä"])
def test_a_folder_name_that_cannot_be_an_id_is_refused(tmp_path, make_task, name):
    made = make_task("fine")
    folder = made.parent / name
    if name != "..":
        made.rename(folder)
    assert refused(folder)


def test_canary_lines_and_a_bom_are_stripped_and_the_rest_stays(make_task):
    text = "\ufeff<!-- BENCHMARK DATA\ncanary GUID 1 -->\n\n# canary 2\r\n\n# Title\nsay canary\n"
    assert load_task(make_task(files={"instruction.md": text})).instruction == "# Title\nsay canary\n"


def test_not_utf8_is_named_with_its_place(make_task):
    folder = make_task()
    (folder / "instruction.md").write_bytes(b"ab\xff")
    assert "instruction.md: not UTF-8 at byte 2" in refused(folder)


def test_links_stay_inside_or_are_refused(make_task):
    folder = make_task()
    (folder / "tests" / "again.txt").symlink_to("../environment/files/note.txt")
    load_task(folder)
    for target, expected in [
        ("/etc/passwd", "outside"),
        ("../..", "outside"),
        ("nowhere", "nowhere"),
        ("..", "leads back"),
    ]:
        link = folder / "tests" / "link"
        link.symlink_to(target)
        assert expected in refused(folder), target
        link.unlink()
    (folder / "tests" / "a").symlink_to("b")
    (folder / "tests" / "b").symlink_to("a")
    assert "circle" in refused(folder)


def test_a_fifo_in_the_folder_is_refused_without_opening_it(make_task):
    folder = make_task()
    os.mkfifo(folder / "tests" / "pipe")
    assert "neither a regular file nor a folder" in refused(folder)


def test_the_content_hash_is_over_sorted_names_and_bytes(make_task):
    folder = make_task()
    digest = sha256()
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    assert load_task(folder).content_hash == digest.hexdigest()
    (folder / "tests" / "test.sh").write_text("changed")
    assert load_task(folder).content_hash != digest.hexdigest()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must begin with FROM, got ''"),
        ("# nothing\n", "must begin with FROM, got ''"),
        ("FRM debian\n", "must begin with FROM, got 'FRM'"),
        ("RUN true\nFROM debian\n", "must begin with FROM, got 'RUN'"),
    ],
)
def test_a_dockerfile_that_is_none_is_named(make_task, text, says):
    message = refused(make_task(files={"environment/Dockerfile": text}))
    assert "environment/Dockerfile: " in message
    assert says in message


def test_a_dockerfile_may_begin_with_comments_and_arguments(make_task):
    load_task(
        make_task(files={"environment/Dockerfile": "# syntax=docker/dockerfile:1\n\nARG A=1\nfrom debian:${A}\n"})
    )


def test_files_that_are_not_text_are_named(make_task):
    for name in ("environment/Dockerfile", "instruction.md", "task.toml"):
        folder = make_task()
        (folder / name).write_bytes(b"\xff\xfe")
        assert f"{name}: not UTF-8 at byte 0" in refused(folder)


def test_windows_line_ends_in_the_tests_are_named(make_task):
    message = refused(make_task(files={"tests/test.sh": "#!/bin/bash\r\ntrue\r\n"}))
    assert "tests/test.sh: Windows line ends" in message


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"\xff\n", "not UTF-8 at byte 0"), (b"", "no command in it"), (b"#!/bin/bash\n", "no command")],
)
def test_an_oracle_that_says_nothing_is_named(make_task, content, says):
    folder = make_task()
    (folder / "solution" / "solve.sh").write_bytes(content)
    with pytest.raises(TaskError, match=says):
        load_task(folder).solution_lines()
