"""The bash harness word by word, and finding a harness by name or import path."""

import pytest

from burnish.envs.errors import UserError
from burnish.envs.sandbox.base import ExecResult
from burnish.rollout.harness.base import Finish, Run, load_harness
from burnish.rollout.harness.bash import BashHarness, clip_output


def shown(output: str, exit_code: int | None = 0, timed_out: bool = False) -> str:
    result = ExecResult(
        output=output,
        exit_code=exit_code,
        timed_out=timed_out,
        truncated=False,
        total_bytes=len(output),
        duration_s=0.1,
    )
    return BashHarness().observe(result).content


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (shown("one\ntwo\n"), "<output>\none\ntwo\n</output>"),
        (shown(""), "<output>\n</output>"),
        (shown("no newline"), "<output>\nno newline</output>"),
        (shown("gone\n", exit_code=2), "<output exit=2>\ngone\n</output>"),
        # 124 and 137 alone prove no time-out, and a time-out has no exit code
        (shown("", exit_code=124), "<output exit=124>\n</output>"),
        (shown("partial", exit_code=None, timed_out=True), "<output timeout>\npartial</output>"),
    ],
)
def test_an_output_is_shown_as_the_terminal_shows_it(message, expected):
    assert message == expected


@pytest.mark.parametrize("content", ["exit", "exit\n", "  exit "])
def test_exit_alone_ends_the_episode(content):
    assert BashHarness().parse(content) == Finish()


@pytest.mark.parametrize("content", ["exit 0", "ls; exit", "exit\nls", "", "EXIT", "echo `id`"])
def test_anything_else_is_run_verbatim(content):
    assert BashHarness().parse(content) == Run(command=content)


def test_what_a_script_renders_reads_back():
    harness = BashHarness()
    for action in (Finish(), Run(command="cat note.txt")):
        assert harness.parse(harness.render(action)) == action


def test_a_long_output_keeps_head_and_tail_and_says_what_is_missing():
    clipped = clip_output("A" * 600 + "B" * 9000 + "C" * 600, 1000)
    assert clipped == "A" * 500 + "\n[9200 characters omitted]\n" + "C" * 500
    assert clip_output("x" * 1000, 1000) == "x" * 1000


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("zsh", "bash"),
        ("no_such_module:Harness", "no_such_module"),
        ("json:Harness", "Harness"),
        ("json:JSONDecoder", "opening"),
    ],
)
def test_a_harness_that_cannot_be_loaded_is_named(spec, named):
    with pytest.raises(UserError, match=named):
        load_harness(spec)


def test_a_harness_is_loaded_by_import_path():
    assert isinstance(load_harness("burnish.rollout.harness.bash:BashHarness"), BashHarness)
