"""The tar reader takes regular files and directories, whatever else an archive holds (C-23)."""

import io
import tarfile

import pytest

from burnish.envs.sandbox.archive import Collector, Entry, pack


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def member(
    name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, link: str = "", mode: int = 0o644
) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.size, made.linkname, made.mode = kind, size, link, mode
    return made


def read(data: bytes, root: str = "/app", max_bytes: int = 1 << 20, max_files: int = 100):
    collector = Collector(max_bytes=max_bytes, max_files=max_files)
    # in odd chunks, as a socket delivers them
    collector.add_archive((data[start : start + 700] for start in range(0, len(data), 700)), root)
    return collector.result()


def test_what_was_packed_is_read_back():
    entries = {"/app/a.txt": Entry(content=b"one"), "/app/bin/run": Entry(content=b"\0\xff" * 900, mode=0o755)}
    found = read(pack(entries, ["/app", "/app/bin", "/app/empty"]))
    assert {file.path: (file.content, file.mode) for file in found.files} == {
        "/app/a.txt": (b"one", 0o644),
        "/app/bin/run": (b"\0\xff" * 900, 0o755),
    }
    assert found.directories == ("/app", "/app/bin", "/app/empty")
    assert not found.rejected


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (member("app/x", tarfile.SYMTYPE, link="../../../../tmp"), "symbolic link"),
        (member("app/x", tarfile.LNKTYPE, link="/etc/shadow"), "hard link"),
        (member("app/x", tarfile.FIFOTYPE), "FIFO"),
        (member("app/x", tarfile.CHRTYPE), "device"),
        (member("app/x", tarfile.BLKTYPE), "device"),
        (member("../../a"), "leads out"),
        (member("app/../../a"), "leads out"),
        (member("/etc/passwd"), "leads out"),
        (member("other/file"), "leads out"),
    ],
)
def test_links_devices_and_traversal_are_rejected_and_the_rest_is_read(bad, why):
    found = read(archive((bad, b""), (member("app/fine", size=2), b"ok")))
    assert [file.path for file in found.files] == ["/app/fine"]
    assert why in found.rejected[0][1]


def test_a_file_below_a_link_or_a_file_does_not_pass():
    found = read(
        archive((member("app/x", size=1), b"a"), (member("app/x/pwn", size=1), b"b"), (member("app/x", size=1), b"c"))
    )
    assert [(file.path, file.content) for file in found.files] == [("/app/x", b"a")]
    assert [why for _, why in found.rejected] == ["below a file", "twice in the archive"]


def test_caps_on_bytes_names_and_counts_hold():
    # a terabyte is refused at its header: nothing of it is read
    huge = member("app/huge", size=1 << 40).tobuf()
    found = read(huge + b"\0" * 2048)
    assert "larger than" in found.rejected[0][1]
    many = archive(*((member(f"app/{number}"), b"") for number in range(500)))
    found = read(many)
    assert len(found.files) == 100
    assert "more than 100 files" in found.rejected[-1][1]
    found = read(archive((member("app/" + "n" * 5000), b"")))
    assert found.rejected[0][1] == "name too long"


def test_the_cap_is_over_all_files_together():
    found = read(archive(*((member(f"app/{n}", size=400), b"x" * 400) for n in range(4))), max_bytes=1000)
    assert len(found.files) == 2
    assert len(found.rejected) == 1


def test_a_stream_without_end_stops():
    def endless():
        while True:
            yield b"\0" * 512 + member("app/x", size=1 << 19).tobuf()

    collector = Collector(max_bytes=1 << 16, max_files=10)
    collector.add_archive(endless(), "/app")
    assert not collector.files


@pytest.mark.parametrize("data", [b"", b"\x01" * 512, b"no tar" * 1000, member("app/x", size=600).tobuf() + b"short"])
def test_what_is_no_whole_archive_gives_no_file(data):
    assert not read(data).files


def test_odd_names_survive_and_set_id_bits_do_not():
    found = read(archive((member("app/new\nline \udcff", size=1, mode=0o6755), b"x")))
    assert found.files[0].path == "/app/new\nline \udcff"
    assert found.files[0].mode == 0o755
    assert len(found.content_hash) == 64


def test_the_hash_depends_on_content_and_not_on_order():
    one, two = (member("app/a", size=1), b"1"), (member("app/b", size=1), b"2")
    assert read(archive(one, two)).content_hash == read(archive(two, one)).content_hash
    assert read(archive(one)).content_hash != read(archive((one[0], b"3"))).content_hash
