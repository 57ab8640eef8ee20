"""burnish replay: what a run recorded comes out again, and what does not is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from burnish.configs.cli import main
from burnish.policy.checkpoint.released import load_policy
from burnish.rollout.ledger import Ledger
from burnish.rollout.types import Slot
from burnish.rollout.weight_sync import publish

pytestmark = pytest.mark.usefixtures("memory_machines")


def replay(folder: Path, slot: str, capsys, *words: str) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["replay", str(folder), slot, "json=true", *words])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("group", "versions"), [(0, {0}), (1, {0, 1}), (2, {1})])
def test_a_deterministic_run_comes_out_again_to_the_bit(exact_run, capsys, group, versions):
    for member in (0, 1):
        code, found = replay(exact_run.folder, exact_run.slot(group, member), capsys)
        assert (code, found["faults"]) == (0, [])
        assert found["attempt"] == f"{exact_run.slot(group, member)}-00"
        tokens = found["tokens"]
        assert len(tokens) >= 9
        assert {token["version"] for token in tokens} == versions
        for token in tokens:
            assert token["recorded"] == token["engine"] == token["trainer"], token
            assert token["recorded_raw"] == token["engine_raw"]
            assert token["drawn"] == token["token_id"]
        assert found["comparisons"]["engine"]["count"] == found["comparisons"]["trainer"]["count"] == len(tokens)
        assert found["comparisons"]["trainer"]["max_abs"] == 0.0
        verdict = found["verdict"]
        assert verdict["equal"]
        assert verdict["same_artifacts"]
        assert verdict["how"] == "what the recorded commands leave in a fresh sandbox (local)"
        assert verdict["turns_that_differ"] == []


def test_a_run_with_kept_sets_that_is_not_deterministic(cut_run, capsys):
    code, found = replay(cut_run.folder, cut_run.slot(1), capsys)
    assert (code, found["faults"]) == (0, [])
    assert (found["bound"], found["deterministic"]) == (0.01, False)
    assert any(token["recorded"] != token["recorded_raw"] for token in found["tokens"])
    assert found["comparisons"]["engine"]["count"] == len(found["tokens"])
    assert found["comparisons"]["trainer"]["max_abs"] < 0.01
    assert main(["replay", str(cut_run.folder), cut_run.slot(1), "verdict=false"]) == 0
    printed = capsys.readouterr().out
    assert "equal within 0.01 (the run was not deterministic)" in printed
    assert "verdict: not asked for (verdict=false)" in printed


def test_the_table_for_people(exact_run, capsys):
    assert main(["replay", str(exact_run.folder), f"{exact_run.slot(1)}-00", "rows=5"]) == 0
    printed = capsys.readouterr().out
    assert f"attempt {exact_run.slot(1)}-00" in printed
    assert printed.count(" same ") >= 5
    assert "tokens that differ less are not shown" in " ".join(printed.split())
    assert "verdict recorded: outcome" in printed
    assert "engine now against recorded:" in printed
    assert printed.splitlines()[-1].startswith("equal to the bit")


def test_a_version_that_is_not_kept_is_told_and_the_others_are_compared(played, capsys):
    shutil.rmtree(played.folder / "weights" / "v000001")
    code, found = replay(played.folder, played.slot(1), capsys)
    assert code == 0
    missing = [token for token in found["tokens"] if token["engine"] is None]
    assert missing
    assert {token["version"] for token in missing} == {1}
    assert found["comparisons"]["engine"]["count"] == len(found["tokens"]) - len(missing) > 0
    (reason,) = found["not_recomputed"]
    assert reason.startswith("the weights of version 1 are not kept: a run keeps its start")


def test_nothing_to_compare_is_not_equal(played, capsys):
    shutil.rmtree(played.folder / "weights")
    code, found = replay(played.folder, played.slot(2), capsys, "verdict=false")
    assert (code, found["faults"]) == (1, ["nothing could be computed again, so nothing is shown to be equal"])


def test_other_weights_under_the_same_number_are_found(played, capsys):
    model = load_policy(Path(played.run.policy))
    publish(model.state_dict(), 1, played.folder / "weights")
    code, found = replay(played.folder, played.slot(2), capsys, "verdict=false")
    assert code == 1
    assert any(fault.startswith("engine: log-probabilities differ by up to") for fault in found["faults"])
    assert any(fault.startswith("trainer: log-probabilities differ by up to") for fault in found["faults"])
    assert any("are drawn otherwise" in fault for fault in found["faults"])
    assert main(["replay", str(played.folder), played.slot(2), "verdict=false"]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out


def test_published_weights_that_are_damaged_are_not_used(played, capsys):
    path = played.folder / "weights" / "v000001" / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    _, found = replay(played.folder, played.slot(2), capsys, "verdict=false")
    (reason,) = found["not_recomputed"]
    assert "differs (checksum" in reason


def test_versions_of_a_lineage_that_was_left_are_not_taken_for_todays(played, capsys):
    ledger = Ledger(played.folder / "ledger.sqlite")
    ledger.load_checkpoint(0)
    ledger.close()
    _, found = replay(played.folder, played.slot(1), capsys, "verdict=false")
    (reason,) = found["not_recomputed"]
    assert reason.startswith("the run went back to version 0 after this attempt")
    assert {token["version"] for token in found["tokens"] if token["engine"] is not None} == {0}


def test_a_block_that_was_changed_is_told(played, capsys):
    path = played.folder / "blocks" / f"{played.slot(0)}-00.tokens"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    code, found = replay(played.folder, played.slot(0), capsys, "verdict=false")
    assert code == 1
    assert found["faults"][0].startswith(f"blocks: block {played.slot(0)}-00/")
    assert found["tokens"] == []


def test_looking_changes_nothing(played, capsys):
    def state() -> dict[str, bytes]:
        files = (p for p in played.folder.rglob("*") if p.is_file() and not p.name.startswith("ledger.sqlite-"))
        return {str(path): path.read_bytes() for path in files}

    before = state()
    assert replay(played.folder, played.slot(0), capsys)[0] == 0
    assert state() == before


@pytest.mark.parametrize(
    ("slot", "says"),
    [
        ("000-000009-000", "no slot '000-000009-000' among the 6 of this run; did you mean 000-00000"),
        ("nothing", "no slot 'nothing' among the 6 of this run; they are 000-000000-000 to 000-000002-001"),
        ("000-000000-000-07", "no slot '000-000000-000-07'"),
        ("", "slot must not be empty"),
    ],
)
def test_a_slot_that_there_is_not(exact_run, capsys, slot, says):
    assert main(["replay", str(exact_run.folder), slot]) == 2
    complaint = capsys.readouterr().err
    assert says in complaint
    assert complaint.count("\n") == 1


def test_slots_without_a_trajectory(played, capsys):
    ledger = Ledger(played.folder / "ledger.sqlite")
    slots = [Slot(task_id="t", group_index=3, member=member) for member in range(2)]
    ledger.add_slots(slots)
    ledger.open_attempt(slots[1].slot_id)
    ledger.close()
    assert main(["replay", str(played.folder), slots[0].slot_id]) == 2
    assert f"slot {slots[0].slot_id} is pending: it was never played" in capsys.readouterr().err
    assert main(["replay", str(played.folder), slots[1].slot_id]) == 2
    assert "left no trajectory: it is in flight, or was abandoned" in capsys.readouterr().err


def nothing(folder: Path) -> None:
    shutil.rmtree(folder)


def no_settings(folder: Path) -> None:
    (folder / "config.yaml").unlink()


def damaged_settings(folder: Path) -> None:
    (folder / "config.yaml").write_text("max_stps: 3\n")


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def damaged_ledger(folder: Path) -> None:
    (folder / "ledger.sqlite").write_bytes(b"no database" * 500)


def one_level_up(folder: Path) -> None:
    shutil.move(folder, folder.with_name("moved"))
    folder.mkdir()
    shutil.move(folder.with_name("moved"), folder / "rl")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (nothing, "is not the folder of an RL run"),
        (no_settings, "config.yaml is missing"),
        (damaged_settings, "not settings of `burnish rl` that this version reads"),
        (no_manifest, "manifest.json"),
        (damaged_ledger, "cannot read the ledger"),
        (one_level_up, "ledger.sqlite is missing; give {folder}/rl"),
    ],
)
def test_a_folder_that_is_no_rl_run(played, capsys, damage, says):
    damage(played.folder)
    assert main(["replay", str(played.folder), played.slot(0)]) == 2
    complaint = capsys.readouterr().err.strip().splitlines()[-1]
    assert complaint.startswith("burnish replay: ")
    assert says.format(folder=played.folder) in complaint


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["a"], "slot is required"),
        (["a", "b", "rows=0"], "rows must be >= 1, got 0"),
        (["a", "b", "max_difference=inf"], "max_difference must be >= 0 and finite"),
        (["a", "b", "c"], "'c' is not an override"),
    ],
)
def test_settings_that_nothing_could_be_replayed_with(words, says, capsys):
    assert main(["replay", *words]) == 2
    assert says in capsys.readouterr().err


def test_the_threads_of_this_process_are_as_the_run_had_them(exact_run, capsys):
    replay(exact_run.folder, exact_run.slot(0), capsys, "verdict=false")
    assert torch.get_num_threads() == exact_run.run.cluster.threads_per_actor
