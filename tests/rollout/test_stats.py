"""Wilson and the paired bootstrap against numbers worked out apart from the code."""

import json

import numpy as np
import pytest

from burnish.rollout.stats import ResultsError, bootstrap_mean, compare, paired_bootstrap, read_results, wilson


@pytest.mark.parametrize(
    ("passed", "n", "lo", "hi"),
    [
        # Newcombe 1998, table I, method 3 (score without continuity correction)
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_wilson_matches_newcombes_table(passed, n, lo, hi):
    interval = wilson(passed, n)
    assert interval.lo == pytest.approx(lo, abs=5e-5)
    assert interval.hi == pytest.approx(hi, abs=5e-5)
    assert interval.mean == passed / n


@pytest.mark.parametrize(("passed", "n"), [(1, 0), (-1, 4), (5, 4)])
def test_wilson_refuses_impossible_counts(passed, n):
    with pytest.raises(ValueError, match="passed="):
        wilson(passed, n)


def test_bootstrap_bounds_approach_the_normal_ones():
    # 100 zeros and 100 ones: mean 0.5, standard error sqrt(.25/200) = 0.035355, bounds 0.5 +- 1.96 * that
    interval = bootstrap_mean(np.repeat([0.0, 1.0], 100), seed=3)
    assert interval.mean == 0.5
    assert interval.lo == pytest.approx(0.5 - 1.96 * 0.035355, abs=0.006)
    assert interval.hi == pytest.approx(0.5 + 1.96 * 0.035355, abs=0.006)
    assert interval == bootstrap_mean(np.repeat([0.0, 1.0], 100), seed=3)


def test_pairing_removes_the_difficulty_of_the_task():
    # every task gains exactly 0.25, whatever its level: no uncertainty is left
    before = {f"task-{i}": i / 100 for i in range(50)}
    gain = paired_bootstrap(before, {task: rate + 0.25 for task, rate in before.items()}, seed=1)
    assert (gain.mean, gain.lo, gain.hi) == pytest.approx((0.25, 0.25, 0.25))
    assert gain.n == 50


def test_paired_bootstrap_refuses_other_tasks():
    with pytest.raises(ResultsError, match="'b'"):
        paired_bootstrap({"a": 1.0}, {"a": 1.0, "b": 0.0})


def test_compare_reads_two_files_by_domain(tmp_path):
    def write(name, passed):
        rows = [{"task": f"t{i}", "domain": "terminal", "passed": p} for i, p in enumerate(passed)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    before = write("before.jsonl", [False, False, True, None])
    after = write("after.jsonl", [True, False, True, True])
    gains = compare(before, after)
    assert gains["terminal"].mean == pytest.approx(1 / 3)
    assert gains["terminal"].n == 3, "a task without a grade on one side is not compared"
    assert gains["all"] == gains["terminal"]


def test_a_torn_last_line_is_ignored_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"task": "a", "passed": true}\n{"task": "b", "pas')
    assert [row["task"] for row in read_results(path)] == ["a"]
    path.write_text('{"task": "a", "passed": true}\n{"task": "b", "pas\n')
    with pytest.raises(ResultsError, match="line 2"):
        read_results(path)


@pytest.mark.parametrize("line", [b"\xff", b"[" * 60_000, b"{"])
def test_a_line_that_is_no_json_is_named(tmp_path, line):
    (tmp_path / "results.jsonl").write_bytes(b'{"task": "a", "passed": true}\n' + line + b"\n")
    with pytest.raises(ResultsError, match=r"results.jsonl line 2: not JSON"):
        read_results(tmp_path / "results.jsonl")
