"""The cache of hidden states: by content, whole or absent, bounded, and never a reason to lose a run."""

import pytest
import torch

from burnish.distill.cache import StateCache, context_key, entry_bytes
from burnish.envs.errors import UserError

ROWS = torch.tensor([3, 4, 9])


def states(seed: int, rows=ROWS, width=8) -> torch.Tensor:
    return torch.randn(len(rows), width, generator=torch.Generator().manual_seed(seed))


def test_what_was_put_comes_back_bit_for_bit_also_in_another_process(tmp_path):
    StateCache(tmp_path, 10**6).put("a", ROWS, states(0))
    found = StateCache(tmp_path, 10**6)
    assert torch.equal(found.get("a", ROWS), states(0))
    assert torch.equal(found.get("a", ROWS[1:]), states(0)[1:]), "fewer rows are there too"
    assert found.get("a", torch.tensor([3, 5])) is None, "a row that was never scored is absent"
    assert found.get("a", torch.tensor([100])) is None
    assert found.get("b", ROWS) is None
    assert found.get("a", ROWS[:0]).shape == (0, 8)


def test_the_key_is_the_content():
    key = context_key("t", [1, 2, 3])
    assert key == context_key("t", (1, 2, 3))
    assert len({key, context_key("u", [1, 2, 3]), context_key("t", [1, 2]), context_key("t", [1, 2, 4])}) == 4
    assert context_key("t", [1, 256]) != context_key("t", [257, 0])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: b"",
    ],
)
def test_damage_is_noticed_and_counts_as_absent(tmp_path, damage, caplog):
    cache = StateCache(tmp_path, 10**6)
    cache.put("a", ROWS, states(0))
    path = tmp_path / "a.states"
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get("a", ROWS) is None
    assert (cache.num_damaged, cache.num_bytes) == (1, 0)
    assert "are made again" in caplog.text
    assert not path.exists()
    cache.put("a", ROWS, states(1))
    assert torch.equal(cache.get("a", ROWS), states(1))


def test_an_entry_that_somebody_removed_is_absent(tmp_path):
    cache = StateCache(tmp_path, 10**6)
    cache.put("a", ROWS, states(0))
    (tmp_path / "a.states").unlink()
    assert cache.get("a", ROWS) is None


def test_half_a_file_of_a_killed_process_is_no_entry(tmp_path):
    (tmp_path / "a.writing").write_bytes(b"half")
    cache = StateCache(tmp_path, 10**6)
    assert cache.get("a", ROWS) is None
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_go_first_and_what_a_step_needs_stays(tmp_path):
    probe = StateCache(tmp_path / "probe", 10**6)
    probe.put("a", ROWS, states(0))
    size = probe.num_bytes
    folder = tmp_path / "cache"
    cache = StateCache(folder, 3 * size)
    for name in "abc":
        cache.put(name, ROWS, states(0))
    cache.get("a", ROWS)
    cache.hold([("b", size), ("d", size), ("e", size)])
    for name in "de":
        cache.put(name, ROWS, states(1))
    assert {path.stem for path in folder.iterdir()} == {"b", "d", "e"}
    assert sum(path.stat().st_size for path in folder.iterdir()) == cache.num_bytes == 3 * size
    assert cache.num_evicted == 2
    cache.hold([])
    cache.put("f", ROWS, states(2))
    assert {path.stem for path in folder.iterdir()} == {"d", "e", "f"}, "nothing is held: the oldest went"


def test_a_smaller_bound_after_a_restart_is_kept(tmp_path):
    cache = StateCache(tmp_path, 10**6)
    for number in range(6):
        cache.put(f"{number}", ROWS, states(number))
    small = StateCache(tmp_path, cache.num_bytes // 2)
    assert small.num_bytes <= cache.num_bytes // 2
    assert small.get("5", ROWS) is not None


def test_a_step_that_cannot_fit_is_refused_before_anything_is_scored(tmp_path):
    cache = StateCache(tmp_path, 2**20)
    needed = [(str(n), entry_bytes(100, 1024)) for n in range(4)]
    with pytest.raises(UserError, match=r"cache.max_gib=0\.000977 cannot hold .* raise it to at least 0\.0016"):
        cache.hold(needed)
    cache.hold(needed[:2])
    cache.hold([*needed[:2], needed[0]])  # the same context twice is one entry


def test_entry_bytes_is_an_upper_bound(tmp_path):
    for rows, width, dtype in (
        (1, 1, torch.float32),
        (7, 96, torch.float32),
        (300, 64, torch.bfloat16),
        (0, 8, torch.float32),
    ):
        cache = StateCache(tmp_path / f"{rows}", 10**9)
        cache.put("a", torch.arange(rows), torch.zeros(rows, width, dtype=dtype))
        assert cache.num_bytes <= entry_bytes(rows, width, dtype)
