"""What is published is what arrives, tensor by tensor, or the receiver says which tensor does not."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from burnish.rollout.weight_sync import Receipt, WeightSyncError, check_receipt, publish, receive


@pytest.fixture
def state():
    module = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    tied = {
        "tied.a": module[0].weight,
        "tied.b": module[0].weight,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
    }
    return (
        module.state_dict()
        | tied
        | {"half": torch.randn(7).to(torch.bfloat16), "odd": torch.arange(3, dtype=torch.int16)}
    )


def test_a_round_trip_is_bit_for_bit_and_counts_buffers(state, tmp_path):
    manifest = publish(state, 4, tmp_path)
    received = receive(manifest)
    assert received.keys() == state.keys()
    assert "1.running_mean" in manifest.checksums, "buffers are weights too"
    for name, tensor in state.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor), name


@pytest.mark.parametrize("name", ["0.weight", "1.running_var", "scalar"])
def test_one_changed_bit_is_named(state, tmp_path, name):
    manifest = publish(state, 4, tmp_path)
    path = tmp_path / "v000004" / "weights.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1).view(torch.uint8)[0] ^= 1
    save_file(tensors, path)
    with pytest.raises(WeightSyncError, match=f"version 4.*{name!r} differs"):
        receive(manifest)


def test_a_missing_and_an_extra_tensor_are_named(state, tmp_path):
    manifest = publish(state, 4, tmp_path)
    path = tmp_path / "v000004" / "weights.safetensors"
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if name != "half"}, path)
    with pytest.raises(WeightSyncError, match="'half' is missing"):
        receive(manifest)
    save_file(tensors | {"zzz": torch.zeros(1)}, path)
    with pytest.raises(WeightSyncError, match="'zzz' is not in it"):
        receive(manifest)


def test_same_bytes_of_another_shape_or_dtype_are_other_weights(tmp_path):
    sums = [
        publish({"w": tensor}, version, tmp_path).checksums["w"]
        for version, tensor in enumerate(
            [torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(6), torch.zeros(2, 3).int()]
        )
    ]
    assert len(set(sums)) == 4


def test_a_torn_file_is_an_error_of_the_push(state, tmp_path):
    manifest = publish(state, 4, tmp_path)
    path = tmp_path / "v000004" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(WeightSyncError, match="cannot be read"):
        receive(manifest)
    path.unlink()
    with pytest.raises(WeightSyncError, match="cannot be read"):
        receive(manifest)


def test_old_versions_dead_lineages_and_left_overs_go(state, tmp_path):
    (tmp_path / ".staging-9-killed").mkdir()
    for version in (7, 8, 1, 2, 3):
        publish(state, version, tmp_path)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["v000002", "v000003"]
    publish({"w": torch.ones(1)}, 3, tmp_path)
    assert load_file(tmp_path / "v000003" / "weights.safetensors").keys() == {"w"}, (
        "a republished version is the new one"
    )


def test_a_generator_with_another_version_or_other_weights_is_fenced(state, tmp_path):
    manifest = publish(state, 4, tmp_path)
    receipt = Receipt(generator="generator-1", version=4, digest=manifest.digest, seconds=0.1)
    check_receipt(receipt, manifest)
    with pytest.raises(WeightSyncError, match="generator-1 acknowledges policy version 3, published is 4"):
        check_receipt(replace(receipt, version=3), manifest)
    with pytest.raises(WeightSyncError, match="generator-1 holds other weights"):
        check_receipt(replace(receipt, digest="0" * 64), manifest)
