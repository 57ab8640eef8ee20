"""Which Dockerfiles need a build, what the others turn into, and that the set-up script writes exact bytes."""

import subprocess

import pytest

from burnish.envs.config import SandboxConfig
from burnish.envs.sandbox.archive import Entry
from burnish.envs.sandbox.images import plan_agent, plan_verifier, setup_script
from burnish.envs.task import TaskError, load_task


def planned(make_task, dockerfile: str, files: dict[str, str | None] | None = None):
    return plan_agent(
        load_task(make_task(files={"environment/Dockerfile": dockerfile, **(files or {})})), SandboxConfig()
    )


def test_a_plain_dockerfile_becomes_files_and_settings(make_task):
    text = """# a comment
FROM burnish-base:1
WORKDIR /srv
WORKDIR app
ENV A=1 B="two words"
ENV OLD form here
COPY files/ \\
     ./
COPY files/note.txt renamed.txt
COPY ["files/note.txt", "/deep/er/"]
"""
    made = planned(make_task, text)
    assert (made.image, made.workdir, made.context) == ("burnish-base:1", "/srv/app", None)
    assert made.env == {"A": "1", "B": "two words", "OLD": "form here"}
    assert sorted(made.files) == ["/deep/er/note.txt", "/srv/app/note.txt", "/srv/app/renamed.txt"]


@pytest.mark.parametrize(
    "step",
    [
        "RUN true",
        "USER nobody",
        "COPY --chown=1:1 files/ /app/",
        "COPY files/*.txt /app/",
        "COPY files/ $HOME",
        "ADD files/ /app/",
        "FROM burnish-base:1",
        "COPY <<END /app/x",
    ],
)
def test_anything_else_is_built_under_a_tag_of_its_content(make_task, step):
    made = planned(make_task, f"FROM burnish-base:1\n{step}\n")
    again = planned(make_task, f"FROM burnish-base:1\n{step}\n# changed\n")
    assert made.context is not None
    assert made.image.startswith("burnish-task:")
    assert made.image != again.image


def test_a_copy_of_nothing_names_the_dockerfile(make_task):
    with pytest.raises(TaskError, match=r"Dockerfile: COPY nothing\.txt: no such file"):
        planned(make_task, "FROM burnish-base:1\nCOPY nothing.txt /app/\n")
    with pytest.raises(TaskError, match="no such file"):
        planned(make_task, "FROM burnish-base:1\nCOPY ../solution /app/\n")


def test_the_verifier_starts_from_the_base_without_the_agents_files(make_task):
    made = plan_verifier(load_task(make_task()), SandboxConfig())
    assert (made.image, made.workdir, made.files) == ("burnish-base:1", "/app", {})
    own = load_task(
        make_task(
            files={"tests/Dockerfile": "FROM other:2\nWORKDIR /grade\nCOPY expected.txt .\n", "tests/expected.txt": "x"}
        )
    )
    made = plan_verifier(own, SandboxConfig())
    assert (made.image, made.workdir, list(made.files)) == ("other:2", "/grade", ["/grade/expected.txt"])


def test_the_setup_script_writes_exact_bytes_and_modes(tmp_path):
    content = bytes(range(256)) + b"%s %% \\n 'quoted' \xc3\xa9\n"
    name = f"{tmp_path}/it's a $dir/file 1"
    script = setup_script(
        {name: Entry(content=content, mode=0o755), f"{tmp_path}/empty": Entry(content=b"")}, [f"{tmp_path}/d"]
    )
    done = subprocess.run(["bash", "-c", script.split(" && ", 1)[1]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = tmp_path / "it's a $dir" / "file 1"
    assert made.read_bytes() == content
    assert made.stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "empty").read_bytes() == b""
    assert (tmp_path / "d").is_dir()
