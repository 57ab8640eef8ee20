"""`burnish synth` end to end in real shells: a task set that loads, the same for a seed, and finished after kill -9."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from burnish.envs.config import Domain, SandboxKind, SynthRun
from burnish.envs.errors import UserError
from burnish.envs.synthesis import pipeline
from burnish.envs.synthesis.contamination import scan_contamination
from burnish.envs.synthesis.gates import Gates
from burnish.envs.synthesis.propose import Proposer
from burnish.envs.synthesis.words import COMPOUND, split_of
from burnish.envs.taskset import load_taskset

FAMILIES = ["look-up", "sort-lines", "write-line"]


def settings(out, **changes):
    fields = {
        "num_train": 4,
        "num_heldout": 3,
        "num_demonstrations": 7,
        "families": FAMILIES,
        "difficulty": [1, 2],
        "workers": 2,
    }
    return SynthRun(out=str(out), sandbox=SandboxKind.local, **{**fields, **changes})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("synth") / "tasks"
    assert pipeline.main(settings(out)) == 0
    return out


def transcripts(out, name):
    name = "demonstrations" if name == "demonstrations" else f"oracle-{name}"
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def test_the_task_set_loads_with_its_splits(made):
    taskset = load_taskset(made)
    assert [len(taskset.split(name)) for name in ("train", "heldout")] == [4, 3]
    assert {taskset.index["tasks"][task.id]["family"] for task in taskset.tasks} == set(FAMILIES)
    assert [task.config.metadata["difficulty"] for task in taskset.tasks] == [
        taskset.index["tasks"][task.id]["difficulty"] for task in taskset.tasks
    ]


def test_the_splits_share_nothing(made):
    taskset = load_taskset(made)
    paths = {name: [task.path for task in taskset.split(name)] for name in ("train", "heldout")}
    assert scan_contamination(paths["train"], paths["heldout"]) == []


def test_transcripts_hold_real_outputs_of_one_split_each(made):
    taskset = load_taskset(made)
    for split in ("train", "heldout"):
        records = transcripts(made, split)
        assert {record["reward"] for record in records} == {1.0}
        assert [record["task_id"] for record in records] == list(taskset.splits[split])
        for record, task in zip(records, taskset.split(split), strict=True):
            assert record["messages"][0] == {"role": "user", "content": task.instruction.strip()}
            said = [message["content"] for message in record["messages"] if message["role"] == "assistant"]
            assert said == [*task.solution_lines(), "exit"]
            if record["family"] == "look-up":
                assert "The code of" in record["messages"][2]["content"]


def test_demonstrations_are_of_other_candidates_and_show_no_name_of_a_task(made):
    demonstrations = transcripts(made, "demonstrations")
    assert len(demonstrations) == 7
    assert {record["reward"] for record in demonstrations} == {None}
    records = transcripts(made, "train") + demonstrations
    assert len({record["task_id"] for record in records}) == len({str(record["messages"]) for record in records}) == 11
    for split in ("train", "heldout", "demonstration"):
        said = [
            m["content"]
            for record in transcripts(made, f"{split}s" if split[0] == "d" else split)
            for m in record["messages"]
        ]
        assert {split_of(name) for text in said for name in COMPOUND.findall(text)} == {split}


def test_a_demonstration_that_goes_wrong_is_left_out(tmp_path, monkeypatch):
    real = Proposer.propose

    def break_write_lines(self, cell):
        candidate = real(self, cell)
        if self.made_tasks < 7 or cell.family != "write-line":
            self.made_tasks += 1
            return candidate
        wrong = replace(candidate.spec.turns[0], command=candidate.spec.turns[0].command + "; touch stray.txt")
        return replace(candidate, spec=replace(candidate.spec, turns=(wrong,)))

    monkeypatch.setattr(Proposer, "made_tasks", 0, raising=False)
    monkeypatch.setattr(Proposer, "propose", break_write_lines)
    pipeline.main(settings(tmp_path / "out"))
    demonstrations = transcripts(tmp_path / "out", "demonstrations")
    assert {record["family"] for record in demonstrations} == {"look-up", "sort-lines"}
    assert load_taskset(tmp_path / "out").index["datasheet"]["demonstrations"] == len(demonstrations) == 5


def test_the_datasheet_counts_what_is_there(made):
    sheet = load_taskset(made).index["datasheet"]
    assert sheet["counts"]["split"] == {"heldout": 3, "train": 4}
    assert sheet["gates"]["oracle"] == {"run": 7, "passed": 7, "rate": 1.0}
    assert sheet["gates"]["nop"] == {"run": 7, "passed": 7, "rate": 1.0}
    assert sheet["settings"]["seed"] == 0
    assert sheet["sandbox"] == "local"
    assert "| sort-lines |" in (made / "DATASHEET.md").read_text()


def test_a_seed_gives_the_same_tasks_and_transcripts_again(made, tmp_path):
    pipeline.main(settings(tmp_path / "again"))
    pipeline.main(settings(tmp_path / "other", seed=1))
    first, again, other = (load_taskset(path) for path in (made, tmp_path / "again", tmp_path / "other"))
    assert first.content_hash == again.content_hash != other.content_hash
    name = "oracle-train.jsonl"
    assert (made / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.fixture(scope="module")
def coding(tmp_path_factory):
    out = tmp_path_factory.mktemp("synth") / "coding"
    run = settings(
        out, domain=Domain.coding, families=[], difficulty=[1], num_train=15, num_heldout=15, num_demonstrations=30
    )
    assert pipeline.main(run) == 0
    return out


def test_the_domain_is_a_property_of_every_task_and_transcript(made, coding):
    for out, domain in ((made, "terminal"), (coding, "coding")):
        taskset = load_taskset(out)
        assert {taskset.index["tasks"][task.id]["domain"] for task in taskset.tasks} == {domain}
        assert {task.config.metadata["domain"] for task in taskset.tasks} == {domain}
        records = [record for name in ("train", "heldout", "demonstrations") for record in transcripts(out, name)]
        assert {record["domain"] for record in records} == {domain}
        assert taskset.index["datasheet"]["settings"]["domain"] == domain
        assert f"Synthetic {domain} tasks" in (out / "DATASHEET.md").read_text()


def test_a_coding_set_is_gated_demonstrated_and_free_of_leaks(coding):
    taskset = load_taskset(coding)
    sheet = taskset.index["datasheet"]
    assert sheet["gates"]["oracle"] == sheet["gates"]["nop"] == {"run": 30, "passed": 30, "rate": 1.0}
    assert (sheet["demonstrations"], sheet["rejected"], sheet["contamination"]) == (30, {}, {"leaks": 0})
    paths = {name: [task.path for task in taskset.split(name)] for name in ("train", "heldout")}
    seen = [*paths["train"], coding / "oracle-train.jsonl", coding / "demonstrations.jsonl"]
    assert scan_contamination(seen, paths["heldout"]) == []


def test_the_domains_share_no_held_out_name(made, coding):
    """So a policy may learn both before it is asked about either."""
    heldout = [task.path for out in (made, coding) for task in load_taskset(out).split("heldout")]
    train = [task.path for out in (made, coding) for task in load_taskset(out).split("train")]
    assert scan_contamination([*train, made / "demonstrations.jsonl", coding / "demonstrations.jsonl"], heldout) == []


def test_a_finished_set_is_left_alone(made):
    before = (made / "taskset.json").stat().st_mtime_ns
    assert pipeline.main(settings(made)) == 0
    assert (made / "taskset.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="other settings"):
        pipeline.main(settings(made, domain=Domain.coding, families=[]))


def test_other_settings_in_the_same_directory_are_refused(made):
    with pytest.raises(UserError, match="other settings"):
        pipeline.main(settings(made, seed=7))


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        pipeline.main(settings(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("path", ["hidden", "no.such.module:Class", "burnish.envs.task:Nothing"])
def test_a_verifier_that_is_none_is_named(tmp_path, path):
    with pytest.raises(UserError, match=path):
        pipeline.main(settings(tmp_path / "out", verifier=path))


def test_without_gates_no_reward_is_claimed(tmp_path):
    pipeline.main(settings(tmp_path / "out", gates=False))
    taskset = load_taskset(tmp_path / "out")
    assert len(taskset) == 7
    assert taskset.index["datasheet"]["gates"]["oracle"] == {"run": 0, "passed": 0, "rate": None}
    assert {record["reward"] for record in transcripts(tmp_path / "out", "demonstrations")} == {None}


def test_a_rejected_candidate_is_recorded_and_replaced(tmp_path, monkeypatch):
    real = Gates.check
    rejected = []

    def reject_first_sort(self, task, oracle):
        report = real(self, task, oracle)
        if task.id.startswith("sort-lines") and not rejected:
            rejected.append(task.id)
            return type(report)(**{**report.__dict__, "reason": "oracle: planted"})
        return report

    monkeypatch.setattr(Gates, "check", reject_first_sort)
    pipeline.main(settings(tmp_path / "out"))
    taskset = load_taskset(tmp_path / "out")
    assert len(taskset) == 7
    assert taskset.index["datasheet"]["rejected"] == {rejected[0]: "oracle: planted"}
    assert taskset.index["datasheet"]["gates"]["oracle"]["run"] == 8
    assert rejected[0] not in {task.id for task in taskset.tasks}


def test_families_that_never_pass_end_the_run(tmp_path, monkeypatch):
    def reject(self, task, oracle):
        return pipeline.GateReport(task_id=task.id, content_hash=task.content_hash, reason="nop: planted")

    monkeypatch.setattr(Gates, "check", reject)
    with pytest.raises(pipeline.SynthesisError, match="nop: planted"):
        pipeline.main(settings(tmp_path / "out"))
    assert not (tmp_path / "out" / "taskset.json").exists()


def test_a_leak_ends_the_run(tmp_path, monkeypatch):
    real = pipeline.refuse_leaks

    def plant_and_scan(out, tasks, transcripts):
        by_split = {task.cell.split: task for task in tasks}
        command = by_split["heldout"].spec.turns[-1].command
        (out / by_split["train"].id / "tests" / "notes.txt").write_text(f"as in {command}\n")
        real(out, tasks, transcripts)

    monkeypatch.setattr(pipeline, "refuse_leaks", plant_and_scan)
    with pytest.raises(pipeline.SynthesisError, match="pieces of held-out tasks occur in training tasks"):
        pipeline.main(settings(tmp_path / "out"))
    assert not (tmp_path / "out" / "taskset.json").exists()


PROGRAM = """
import sys
from burnish.envs.config import SandboxKind, SynthRun
from burnish.envs.synthesis import pipeline
pipeline.main(SynthRun(out=sys.argv[1], sandbox=SandboxKind.local, num_train=12, num_heldout=12,
                       families=["look-up", "sort-lines", "write-line"], workers=1))
"""


def test_kill_9_loses_nothing_and_repeats_nothing(tmp_path):
    out = tmp_path / "killed"
    journal = out / pipeline.JOURNAL
    kills = 0
    for lines in (3, 9):
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(out)], start_new_session=True)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if journal.exists() and journal.read_bytes().count(b"\n") >= lines:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        process.wait()
    assert kills == 2
    assert not (out / "taskset.json").exists()
    subprocess.run([sys.executable, "-c", PROGRAM, str(out)], check=True)
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "whole")], check=True)
    killed, whole = load_taskset(out), load_taskset(tmp_path / "whole")
    assert killed.content_hash == whole.content_hash
    assert killed.index["datasheet"]["gates_resumed"] >= 8
    gated = [json.loads(line.split(" ", 1)[1])["task_id"] for line in journal.read_text().splitlines()[1:]]
    assert len(gated) == len(set(gated)) == 24
    assert (out / "oracle-train.jsonl").read_bytes() == (tmp_path / "whole" / "oracle-train.jsonl").read_bytes()


@pytest.mark.docker
def test_the_same_tasks_and_transcripts_come_from_containers(made, tmp_path):
    run = settings(tmp_path / "docker")
    run.sandbox = SandboxKind.docker
    pipeline.main(run)
    assert load_taskset(tmp_path / "docker").content_hash == load_taskset(made).content_hash
    name = "oracle-heldout.jsonl"
    assert (tmp_path / "docker" / name).read_bytes() == (made / name).read_bytes()
