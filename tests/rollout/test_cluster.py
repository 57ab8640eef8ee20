"""Placement is refused at once with what is short; processes of a dead driver are swept, others are not."""

import os
import subprocess
import time

import pytest

from burnish.envs.sandbox.lease import driver_identity
from burnish.rollout.cluster import OWNER, Bundle, PlacementError, bundles_of, place, sweep_orphans
from burnish.rollout.config import ClusterConfig


def test_a_short_node_is_named_although_the_sum_is_fine():
    # public case E05: 2 nodes with 8 GPUs, 10 and 110 free CPUs, 8 bundles of 1 GPU and 3 CPUs a node
    groups = [Bundle(name=f"group-{i}", num_cpus=3, num_gpus=1, count=8) for i in range(2)]
    free = {"node-1": {"CPU": 10, "GPU": 8}, "node-2": {"CPU": 110, "GPU": 8}}
    with pytest.raises(PlacementError, match="node-1 has 10 CPU free of the 24 needed"):
        place(groups, free)
    free["node-1"]["CPU"] = 30
    placed = place(groups, free)
    assert sorted(map(len, placed.values())) == [1, 1]


def test_the_local_preset_fits_into_two_cores_and_not_into_one():
    assert place(bundles_of(ClusterConfig()), {"this machine": {"CPU": 2.0}})
    with pytest.raises(PlacementError, match="this machine has"):
        place(bundles_of(ClusterConfig()), {"this machine": {"CPU": 1.0}})


def test_sweep_kills_children_of_dead_drivers_only():
    def child_of(owner: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"], env={**os.environ, OWNER: owner})

    orphan, own = child_of(driver_identity().replace(f"/{os.getpid()}/", "/999999999/")), child_of(driver_identity())
    try:
        time.sleep(0.1)  # until exec has replaced the environment
        assert orphan.pid in sweep_orphans()
        assert orphan.wait(timeout=5) == -9
        assert own.poll() is None
    finally:
        own.kill()
        own.wait()


def test_files_of_dead_clusters_go_and_those_of_living_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("burnish.rollout.cluster.SHORT_TMP", tmp_path)
    dead, alive, other = (tmp_path / name for name in ("burnish-ray-dead", "burnish-ray-alive", "mine"))
    for folder, owner in ((dead, "gone"), (alive, driver_identity()), (other, "gone")):
        folder.mkdir()
        (folder / "owner").write_text(
            driver_identity().replace(f"/{os.getpid()}/", "/999999999/") if owner == "gone" else owner
        )
    sweep_orphans()
    assert [dead.exists(), alive.exists(), other.exists()] == [False, True, True]
