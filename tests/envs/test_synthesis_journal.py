"""A journal keeps what was appended, drops what a crash cut off, and refuses what was changed."""

import pytest

from burnish.envs.errors import UserError
from burnish.envs.synthesis.journal import Journal


@pytest.fixture
def path(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    for number in range(3):
        journal.append({"number": number, "text": "zwei\nlines"})
    journal.close()
    return journal.path


def test_records_come_back(path):
    assert [record["number"] for record in Journal(path)] == [0, 1, 2]


def test_any_cut_keeps_whole_records_and_takes_new_ones(path):
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        journal = Journal(path)
        kept = whole[:size].count(b"\n")
        assert [record["number"] for record in journal] == list(range(kept)), size
        journal.append({"number": 9})
        journal.close()
        assert [record["number"] for record in Journal(path)] == [*range(kept), 9], size


def test_a_changed_record_is_an_error(path):
    path.write_bytes(path.read_bytes().replace(b'"number": 1', b'"number": 7'))
    with pytest.raises(UserError, match="line 2 is damaged"):
        Journal(path)


def test_a_journal_has_one_writer(path):
    first = Journal(path)
    with pytest.raises(UserError, match="is being written by another process"):
        Journal(path)
    first.close()
    Journal(path).close()
