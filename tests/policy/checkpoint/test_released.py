"""Policy folders: every tensor accounted for by name, damage named, saves that a kill cannot break."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from burnish.policy.checkpoint import released
from burnish.policy.checkpoint.released import (
    CheckpointError,
    load_policy,
    load_weights,
    read_tensors,
    released_tensors,
    save_policy,
)
from burnish.policy.config import ConfigError
from burnish.policy.model.transformer import Transformer


@pytest.fixture
def folder(core, tmp_path) -> Path:
    return save_policy(core, tmp_path / "policy")


def states_equal(one: Transformer, other: Transformer) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def rewrite(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def shard(folder: Path, count: int = 3) -> dict[str, str]:
    """Split model.safetensors into shards with an index; returns the weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {
        name: f"model-{i * count // len(names) + 1:05d}-of-{count:05d}.safetensors" for i, name in enumerate(names)
    }
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_folder_gives_back_every_bit(core, folder):
    loaded = load_policy(folder)
    assert loaded.config == core.config
    assert states_equal(loaded, core)
    again = save_policy(loaded, folder.with_name("again"))
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_names_are_the_releases_and_experts_are_slices_of_the_stack(core, folder):
    names = dict(released_tensors(core))
    stored = load_file(folder / "model.safetensors")
    assert set(names) == set(stored)
    for name in (
        "embed.weight", "norm.weight", "head.weight", "layers.0.attn.wq_a.weight", "layers.7.attn.attn_sink",
        "layers.2.attn.compressor.wgate.weight", "layers.4.attn.indexer.wk.weight", "layers.6.attn.indexer.wq_b.weight",
        "layers.3.ffn.gate.bias_vl", "layers.3.ffn.shared_experts.w2.weight", "layers.5.hc_ffn_scale",
    ):  # fmt: skip
        assert name in stored
    assert "layers.4.attn.compressor.wgate.weight" not in stored
    assert "layers.6.attn.indexer.wk.weight" not in stored
    for which, stack in (("w1", core.layers[1].ffn.experts.w1), ("w2", core.layers[1].ffn.experts.w2)):
        for expert in range(8):
            assert torch.equal(stored[f"layers.1.ffn.experts.{expert}.{which}.weight"], stack[expert])
    # one layer: attention 8, MoE 3 + 8*3 + 3, two norms, six mHC; then compressors 3 + 2, indexers 3*2 + 2*2, top 3
    assert len(stored) == 8 * (8 + 30 + 2 + 6) + 5 + 10 + 3


def test_the_released_geometry_has_the_released_number_of_tensors():
    """96,085 keys less scales, n-gram memory, drafts and vision."""
    from burnish.policy.presets import flash

    config = flash()
    config.engram_layer_ids, config.engram_num_embeddings = [], []
    with torch.device("meta"):
        names = [name for name, _ in released_tensors(Transformer(config))]
    scales = 40 * (5 + 384 * 3 + 3) + 8
    assert len(names) == 93_418 - 12 - scales
    assert "layers.39.ffn.experts.383.w2.weight" in names


def test_half_precision_is_read_exactly(core, folder):
    def halve(tensors):
        for name in tensors:
            tensors[name] = tensors[name].bfloat16()

    rewrite(folder / "model.safetensors", halve)
    loaded = load_policy(folder)
    assert loaded.embed.weight.dtype == torch.float32
    assert torch.equal(loaded.embed.weight, core.embed.weight.bfloat16().float())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("layers.3.attn.wkv.weight"), r"tensor layers.3.attn.wkv.weight is missing"),
        (lambda t: t.pop("layers.3.ffn.experts.7.w1.weight"), r"tensor layers.3.ffn.experts.7.w1.weight is missing"),
        (lambda t: [t.pop("norm.weight"), t.pop("embed.weight")], r"tensor embed.weight is missing and 1 more"),
        (
            lambda t: t.update({"layers.3.attn.wkv.bias": torch.zeros(3)}),
            r"model.safetensors: tensor layers.3.attn.wkv.bias does not belong to this model",
        ),
        (
            lambda t: t.update({"layers.3.ffn.experts.8.w1.weight": torch.zeros(32, 64)}),
            r"tensor layers.3.ffn.experts.8.w1.weight does not belong",
        ),
        (
            lambda t: t.update({"norm.weight": torch.zeros(63)}),
            r"tensor norm.weight must be \[64\] for this config, got \[63\]",
        ),
        (
            lambda t: t.update({"layers.0.attn.wq_a.scale": torch.zeros(1, 2, dtype=torch.uint8)}),
            r"tensor layers.0.attn.wq_a.scale is a block scale; quantised",
        ),
        (
            lambda t: t.update({"norm.weight": torch.zeros(64).to(torch.float8_e4m3fn)}),
            r"tensor norm.weight is stored as torch.float8_e4m3fn; quantised",
        ),
    ],
)
def test_a_tensor_that_is_not_as_it_should_be_is_named(folder, change, sentence):
    rewrite(folder / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=sentence):
        load_policy(folder)


def test_a_tensor_that_comes_twice_is_named(core_config, folder, monkeypatch):
    once = list(read_tensors(folder))
    monkeypatch.setattr(released, "read_tensors", lambda directory: iter(once + once[-1:]))
    with pytest.raises(CheckpointError, match=rf"tensor {once[-1][1]} was read already"):
        load_weights(Transformer(core_config), folder)


# ---- public case G04: an index that does not match the files ---------------------------------------------------------


def test_shards_are_read_through_their_index(core, folder):
    shard(folder)
    assert states_equal(load_policy(folder), core)


def test_an_absent_shard_is_named_with_its_first_tensor(folder):
    weight_map = shard(folder)
    (folder / "model-00003-of-00003.safetensors").unlink()
    first = next(name for name, file in weight_map.items() if file.startswith("model-00003"))
    with pytest.raises(
        CheckpointError, match=rf"puts tensor {first} into model-00003-of-00003.safetensors, but that file is missing"
    ):
        next(read_tensors(folder))  # before anything is read


def test_a_stale_extra_shard_changes_nothing(core, folder):
    shard(folder)
    save_file({"embed.weight": torch.zeros(115, 64)}, folder / "model-00009-of-00009.safetensors")
    save_file({"norm.weight": torch.zeros(64)}, folder / "model.safetensors")
    assert states_equal(load_policy(folder), core)


def test_a_tensor_in_another_shard_than_the_index_says_is_named(folder):
    weight_map = shard(folder)
    name, file = next(iter(weight_map.items()))
    other = sorted(set(weight_map.values()) - {file})[0]
    write_index(folder, weight_map | {name: other})
    with pytest.raises(CheckpointError, match=rf"{other}: tensor {name} is in the index but not in this file"):
        load_policy(folder)


@pytest.mark.parametrize("keep", [0, 4, 500, 0.5, -1])
def test_a_file_cut_short_is_named(folder, keep):
    shard(folder)
    path = folder / "model-00002-of-00003.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors: not a whole safetensors file"):
        load_policy(folder)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", r"index.json: not JSON \(line 1"),
        ("[]", "no weight_map from tensor names to file names"),
        ('{"weight_map": {"a": 3}}', "no weight_map from tensor names to file names"),
        ('{"weight_map": {"a": "x", "b": "y", "a": "y"}}', "index.json: a is named twice"),
    ],
)
def test_an_index_that_is_none_is_named(folder, text, sentence):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=sentence):
        load_policy(folder)


def test_an_empty_or_absent_folder_is_named(folder):
    with pytest.raises(FileNotFoundError, match=r"no policy folder at .*elsewhere; make one with `burnish init`"):
        load_policy(folder.with_name("elsewhere"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model.safetensors and no model.safetensors.index.json in"):
        load_policy(folder)
    (folder / "config.json").write_text("{]")
    with pytest.raises(ConfigError, match=r"config.json: not JSON \(line 1"):
        load_policy(folder)


# ---- saving ----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_kill_at_any_step_leaves_the_old_folder_or_the_new_one(make_core, tmp_path, monkeypatch, can_exchange):
    """Every call that touches the disk is once the last one; what is then loaded is whole."""
    old, new = make_core(0), make_core(1)
    real_exchange = released._exchange
    steps = {"left": None}

    def counted(function):
        def call(*args, **kwargs):
            if steps["left"] is not None:
                if steps["left"] == 0:
                    raise Killed
                steps["left"] -= 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(released, "_exchange", counted(real_exchange if can_exchange else lambda a, b: False))
    monkeypatch.setattr(released, "save_file", counted(save_file))
    monkeypatch.setattr(released.os, "fsync", counted(os.fsync))
    monkeypatch.setattr(Path, "rename", counted(Path.rename))
    monkeypatch.setattr(Path, "write_text", counted(Path.write_text))
    monkeypatch.setattr(Path, "mkdir", counted(Path.mkdir))
    monkeypatch.setattr(released.shutil, "rmtree", counted(shutil.rmtree))
    directory, seen = tmp_path / "policy", []
    for step in range(40):
        steps["left"] = None
        save_policy(old, directory)
        steps["left"] = step
        try:
            save_policy(new, directory)
            is_killed = False
        except Killed:
            is_killed = True
        steps["left"] = None
        loaded = load_policy(directory)
        seen.append(states_equal(loaded, new))
        assert seen[-1] or states_equal(loaded, old)
        for leftover in tmp_path.glob(".policy.*"):
            shutil.rmtree(leftover)
        if not is_killed:
            break
    assert seen[-1]
    assert seen[0] is False
    assert seen == sorted(seen), "once the new folder is there, it stays"
    assert len(seen) > 6


def test_two_names_are_exchanged_in_one_step(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "who").write_text(name)
    if not released._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange two names")
    assert (tmp_path / "a" / "who").read_text() == "b"
    assert not released._exchange(tmp_path / "a", tmp_path / "missing")


def test_side_files_come_along_and_old_ones_do_not_stay(core, tmp_path):
    side = tmp_path / "side"
    side.mkdir()
    (side / "tokenizer.json").write_text("{}")
    (side / "notes.txt").write_text("no part of a policy")
    folder = save_policy(core, tmp_path / "policy", side_files_from=side)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    save_policy(core, folder)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


# ---- what a user's folder may lose ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_names_its_tensor(folder, value):
    rewrite(folder / "model.safetensors", lambda tensors: tensors["norm.weight"].view(-1)[0].fill_(value))
    with pytest.raises(CheckpointError, match=r"model.safetensors: tensor norm.weight holds NaN or infinity"):
        load_policy(folder)


def test_a_folder_with_other_content_or_a_file_is_never_replaced(core, folder, tmp_path):
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"policy holds thesis.tex, which is no file of a policy and would be lost"
    ):
        save_policy(core, folder)
    assert (folder / "thesis.tex").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"file is a file; give the path of a policy folder"):
        save_policy(core, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_leaves_the_old_folder_and_nothing_beside_it(make_core, tmp_path, monkeypatch):
    old = make_core(0)
    folder = save_policy(old, tmp_path / "policy")

    def full(*args, **kwargs):
        Path(args[1]).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(released, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_policy(make_core(1), folder)
    assert states_equal(load_policy(folder), old)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_an_index_that_is_not_text_is_named(folder):
    (folder / "model.safetensors.index.json").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"index.json: not UTF-8 \(byte 0\)"):
        load_policy(folder)
