"""Token log and blocks: what was written is what is read, and damage anywhere is seen and named."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from burnish.policy.inference.prefill import PrefillEntry, PrefillSource
from burnish.rollout.blocks import BlockError, log_path, read_block, read_log
from burnish.rollout.token_log import TokenLog


def entry(**changes) -> PrefillEntry:
    fields = {
        "hit": 0, "source": PrefillSource.cold, "end": 2, "decoder_start": 0, "decoder_floor": 0, "version": 3, "epoch": 0
    }  # fmt: skip
    return PrefillEntry(**{**fields, **changes})


def write_two_turns(directory, attempt_id="000-000000-000-00"):
    """The two turns of public case B08: ids stay the sampled ones, tool text comes between them unsampled."""
    with TokenLog(directory, attempt_id) as log:
        log.open_turn(context_id="0", turn=0, start=0, input_ids=[10, 11])
        log.append_prefill(entry())
        log.append_sampled([1, 2], [-0.8, -0.4], [-0.7, -0.3], [3, 3], kept=[[1, 4], []])
        log.append_sampled([9], [-0.2], [-0.1], [4], kept=[[9]])
        log.append_routes(0, np.arange(2 * 2 * 3, dtype=np.uint16).reshape(2, 2, 3))
        log.seal_turn()
        log.open_turn(context_id="0", turn=1, start=5, input_ids=[20, 21])
        log.append_prefill(entry(hit=4, source=PrefillSource.resident, end=7, decoder_start=4))
        log.append_sampled([3, 9], [-0.5, -0.3], [-0.4, -0.2], [4, 4])
        log.seal_turn()
    return log


def test_sampled_ids_and_log_probs_stay_in_place_between_turns(tmp_path):
    log = write_two_turns(tmp_path)
    first, second = (read_block(tmp_path, ref) for ref in log.refs)
    assert np.concatenate([first.ids_T, second.ids_T]).tolist() == [10, 11, 1, 2, 9, 20, 21, 3, 9]
    assert np.concatenate([first.sampled_T, second.sampled_T]).astype(int).tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1]
    lp = np.concatenate([first.lp_behaviour_T, second.lp_behaviour_T])
    np.testing.assert_allclose(lp[[2, 3, 4, 7, 8]], [-0.7, -0.3, -0.1, -0.4, -0.2], rtol=1e-6)
    assert np.isnan(lp[[0, 1, 5, 6]]).all()  # a zero would mean probability 1
    assert (first.end, second.start) == (5, 5)


def test_everything_written_is_read_back(tmp_path):
    log = write_two_turns(tmp_path)
    first = read_block(tmp_path, log.refs[0])
    assert first.version_T.tolist() == [-1, -1, 3, 3, 4]
    assert [first.kept(t).tolist() for t in range(5)] == [[], [], [1, 4], [], [9]]
    assert first.routes_TLK is not None
    assert first.routes_TLK[:2].ravel().tolist() == list(range(12))
    assert (first.routes_TLK[2:] == 0xFFFF).all()
    assert first.prefills == (entry(),)
    assert {len(a) for a in (first.ids_T, first.sampled_T, first.lp_raw_T, first.lp_behaviour_T, first.version_T)} == {
        5
    }
    assert (log.refs[0].num_tokens, log.refs[0].num_sampled, log.refs[1].num_sampled) == (5, 3, 2)
    contents = read_log(log.path)
    assert contents.damage is None
    assert contents.refs == tuple(log.refs)
    assert contents.valid_bytes == log.path.stat().st_size
    assert [b.digest for b in contents.blocks] == [r.digest for r in log.refs]


def test_arrays_of_a_block_cannot_be_changed(tmp_path):
    block = read_block(tmp_path, write_two_turns(tmp_path).refs[0])
    for array in (block.ids_T, block.lp_behaviour_T, block.kept_offsets, block.routes_TLK):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_a_cut_at_any_byte_keeps_the_whole_turns_before_it_and_says_so(tmp_path):
    log = write_two_turns(tmp_path)
    data = log.path.read_bytes()
    boundary = log.refs[1].offset
    seen = set()
    for cut in range(len(data)):
        path = tmp_path / "cut.tokens"
        path.write_bytes(data[:cut])
        contents = read_log(path)
        assert contents.valid_bytes <= cut
        assert contents.damage is not None or contents.valid_bytes == cut
        assert len(contents.blocks) == (1 if cut >= boundary else 0)
        if contents.unsealed is not None:
            whole = read_log(log.path).blocks[contents.unsealed.index]
            n = len(contents.unsealed)
            assert contents.unsealed.ids_T.tolist() == whole.ids_T.tolist()[:n]
            seen.add((contents.unsealed.index, n))
    # tokens that were logged before the cut are kept, not only sealed turns
    assert {(0, 2), (0, 4), (0, 5), (1, 2), (1, 4)} <= seen


def test_a_flip_of_any_bit_is_found_by_reader_and_digest(tmp_path):
    log = write_two_turns(tmp_path)
    data = log.path.read_bytes()
    path = log_path(tmp_path, "flipped")
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        path.write_bytes(flipped)
        contents = read_log(path)
        assert contents.damage is not None, f"flip at byte {at} went unseen"
        assert contents.valid_bytes <= at
        log.path.write_bytes(flipped)
        for ref in log.refs:
            if ref.offset <= at < ref.offset + ref.size:
                with pytest.raises(BlockError, match="expected"):
                    read_block(tmp_path, ref)
            else:
                read_block(tmp_path, ref)


def test_random_damage_never_yields_a_wrong_token(tmp_path):
    """Deletes, inserts, swaps and overwrites of random ranges: only true prefixes are ever believed."""
    log = write_two_turns(tmp_path)
    data = log.path.read_bytes()
    truth = [b.ids_T.tolist() for b in read_log(log.path).blocks]
    path = tmp_path / "fuzzed.tokens"
    rng = np.random.default_rng(7)
    for _ in range(1500):
        a, b = sorted(rng.integers(0, len(data) + 1, 2))
        noise = rng.integers(0, 256, rng.integers(0, 24), dtype=np.uint8).tobytes()
        kind = rng.integers(0, 4)
        damaged = [data[:a] + data[b:], data[:a] + noise + data[a:], data[:a] + noise + data[a + len(noise) :],
                   data[:a] + data[b:] + data[a:b]][kind]  # fmt: skip
        path.write_bytes(damaged)
        contents = read_log(path)
        assert [b.ids_T.tolist() for b in contents.blocks] == truth[: len(contents.blocks)]
        assert contents.damage is not None or damaged == data[: len(damaged)]


def test_a_duplicated_record_is_not_read_twice(tmp_path):
    log = write_two_turns(tmp_path)
    data = log.path.read_bytes()
    ref = log.refs[1]
    path = tmp_path / "twice.tokens"
    path.write_bytes(data + data[ref.offset :])
    contents = read_log(path)
    assert len(contents.blocks) == 2
    assert "bad checksum" in (contents.damage or "")


def test_kill_9_while_writing_leaves_a_readable_log(tmp_path):
    code = f"""
from pathlib import Path
from burnish.rollout.token_log import TokenLog
log = TokenLog(Path({str(tmp_path)!r}), "killed")
position = 0
for turn in range(10**6):
    log.open_turn(context_id="0", turn=turn, start=position, input_ids=[turn % 1000] * 3)
    for i in range(5):
        log.append_sampled([i], [-1.0], [-1.0], [turn])
    log.seal_turn()
    position += 8
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    path = log_path(tmp_path, "killed")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (path.exists() and path.stat().st_size > 20_000):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    contents = read_log(path)
    assert len(contents.blocks) > 20
    for turn, (block, ref) in enumerate(zip(contents.blocks, contents.refs, strict=True)):
        assert block.ids_T.tolist() == [turn % 1000] * 3 + [0, 1, 2, 3, 4]
        assert read_block(tmp_path, ref).digest == block.digest
    assert path.stat().st_size - contents.valid_bytes < 100  # at most the record in flight


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [-1.0], [-1.0, -1.0], [0, 0]), "lengths differ"),
        (([1], None, [-1.0], [0]), "without log-probabilities"),
        (([1], [float("nan")], [-1.0], [0]), "lp_raw of sampled token 0 is nan"),
        (([1], [-1.0], [0.5], [0]), "lp_behaviour of sampled token 0 is 0.5"),
        (([1], [-1.0], [-1.0], [-1]), "policy version -1"),
        (([1], [-1.0], [-1.0], [0], [[2, 3]]), "not in its kept set"),
    ],
)
def test_what_breaks_the_token_contract_is_refused_and_not_written(tmp_path, arguments, message):
    with TokenLog(tmp_path, "a") as log:
        log.open_turn(context_id="0", turn=0, start=0, input_ids=[5])
        size = log.path.stat().st_size
        with pytest.raises(ValueError, match=message):
            log.append_sampled(*arguments)
        assert log.path.stat().st_size == size


def test_a_context_only_grows_at_its_end(tmp_path):
    with TokenLog(tmp_path, "a") as log:
        log.open_turn(context_id="0", turn=0, start=0, input_ids=[5, 6])
        with pytest.raises(ValueError, match="still open"):
            log.open_turn(context_id="0", turn=1, start=2, input_ids=[7])
        log.seal_turn()
        with pytest.raises(ValueError, match="expected start 2, got 1"):
            log.open_turn(context_id="0", turn=1, start=1, input_ids=[7])
        log.open_turn(context_id="1", turn=1, start=0, input_ids=[7])  # another context is free to start anywhere
        with pytest.raises(ValueError, match=r"rows 0\.\.2 of a block of 1 tokens"):
            log.append_routes(0, np.zeros((2, 1, 1), np.uint16))
        log.seal_turn()
        with pytest.raises(ValueError, match="no turn is open"):
            log.append_sampled([1], [-1.0], [-1.0], [0])


def test_an_attempt_has_one_log_and_a_safe_name(tmp_path):
    with TokenLog(tmp_path, "a"), pytest.raises(FileExistsError):
        TokenLog(tmp_path, "a")
    with pytest.raises(ValueError, match="cannot name a file"):
        TokenLog(tmp_path, "../a")


def test_a_missing_or_swapped_block_is_an_error(tmp_path):
    log = write_two_turns(tmp_path)
    other = write_two_turns(tmp_path, "other")
    with pytest.raises(BlockError, match="is missing"):
        read_block(tmp_path / "elsewhere", log.refs[0])
    log.path.write_bytes(other.path.read_bytes())  # same tokens, another attempt's log
    with pytest.raises(BlockError, match="expected"):
        read_block(tmp_path, log.refs[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hit": 3}, "must lie in"),
        ({"hit": 1}, "cold prefill reuses nothing"),
        ({"decoder_floor": 1}, "decoder_floor <= decoder_start"),
        ({"source": "warm"}, "warm"),
    ],
)
def test_an_impossible_prefill_entry_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        entry(**changes)


def test_a_prefill_entry_survives_its_dict():
    assert PrefillEntry.from_dict(entry().to_dict()) == entry()
    with pytest.raises(ValueError, match="expected the fields"):
        PrefillEntry.from_dict({**entry().to_dict(), "hits": 1})
