"""NewHarness by hand: what it says, what it understands, and that the oracle can speak through it."""

from pathlib import Path

import pytest

import burnish.envs.task
from burnish.configs.templates.harness import NewHarness
from burnish.envs.sandbox.base import ExecResult
from burnish.envs.task import load_task
from burnish.policy.encoding.messages import Role
from burnish.rollout.harness.base import Finish, Run, load_harness

SAMPLES = Path(burnish.envs.task.__file__).with_name("tasks")
HARNESS = NewHarness()


def test_it_is_a_harness():
    assert isinstance(load_harness("burnish.configs.templates.harness:NewHarness"), NewHarness)


@pytest.mark.parametrize("action", [Finish(), Run(command="ls"), Run(command="cat > x <<'END'\n```\na b\n```\nEND")])
def test_parse_reads_what_render_says(action):
    assert HARNESS.parse(HARNESS.render(action)) == action


def test_words_without_a_block_go_to_the_shell():
    assert HARNESS.parse("ls -l") == Run(command="ls -l")
    assert HARNESS.parse("First I look.\n```bash\nls\n```") == Run(command="ls")


def test_the_policy_is_told_the_task_and_the_rules():
    task = load_task(min(path for path in SAMPLES.iterdir() if path.is_dir()))
    (message,) = HARNESS.opening(task)
    assert message.role is Role.user
    assert message.content.startswith(task.instruction.strip())


@pytest.mark.parametrize(
    ("code", "timed_out", "says"), [(0, False, "out\n"), (3, False, "out\n(exit code 3)"), (None, True, "too long")]
)
def test_the_policy_is_told_what_its_command_did(code, timed_out, says):
    result = ExecResult(
        output="out\n", exit_code=code, timed_out=timed_out, truncated=False, total_bytes=4, duration_s=0.1
    )
    assert says in HARNESS.observe(result).content
