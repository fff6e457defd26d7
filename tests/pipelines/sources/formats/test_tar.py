import gzip
import io
import tarfile
import tracemalloc
from contextlib import suppress
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sources.formats.tar import read_member, read_members, reject_reason, walk
from shardset.errors import SourceError
from shardset.format.tar import BLOCK, END
from tests.makers.tars import content_offset, plain, special, tar_bytes, tar_of

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
FILES = {"a.jpg": b"a" * 700, "b/c.jpg": b"", "d.jpg": b"d" * 512}
SMALL = tar_bytes(FILES)
FACTS = attrgetter("name", "offset_data", "size", "type")


def contents(data: bytes, start: int = 0, stop: int | None = None) -> dict[str, bytes]:
    file = io.BytesIO(data)  # read between the members, as callers may
    return {member.name: read_member(file, member) for member in walk(file, "x.tar", start, stop)}


def sparse() -> tuple[tarfile.TarInfo, bytes]:
    info = plain("hole.jpg", b"")
    sparse = {"major": "0", "map": "0,0", "size": "9", "name": "x"}
    info.pax_headers = {f"GNU.sparse.{name}": value for name, value in sparse.items()}
    return info, b""


NAMES = st.text(st.sampled_from("ab/. äß"), min_size=1, max_size=130).filter(
    lambda name: name.strip("/. ") == name
)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(NAMES, st.integers(0, 1100), st.sampled_from(FORMATS)), min_size=1, max_size=8
    ),
    st.data(),
)
def test_members_are_those_that_pythons_tarfile_finds(found, data):
    raw = io.BytesIO()
    for name, size, format in found:
        info = tarfile.TarInfo(name)
        info.size = size
        if format != tarfile.USTAR_FORMAT or (name.isascii() and len(name) <= 100):
            raw.write(info.tobuf(format) + bytes(size) + bytes(-size % BLOCK))
        if data.draw(st.booleans()):
            raw.write(special("a folder", tarfile.DIRTYPE).tobuf(format))
    raw.write(END)
    with tarfile.open(fileobj=io.BytesIO(raw.getvalue())) as archive:
        expected = [FACTS(one) for one in archive if not one.isdir()]
    assert [*map(FACTS, walk(io.BytesIO(raw.getvalue()), "x.tar"))] == expected


def test_a_name_that_is_not_utf8_stays_printable():
    raw = tar_bytes({"a~.jpg": b"1"})
    header = bytearray(raw[:BLOCK].replace(b"~", b"\xe4"))
    header[148:156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * 32)
    assert list(contents(bytes(header) + raw[BLOCK:])) == ["a\\xe4.jpg"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_tar_inside_a_tar_is_walked_with_offsets_of_the_outer_one(format):
    inner = tar_bytes(FILES, format)
    outer = tar_bytes(
        {"n1.tar": tar_bytes({"other.jpg": b"1"}), "n2.tar": inner, "n3.tar": b"junk"}, format
    )
    start = content_offset(outer, "n2.tar")
    assert contents(outer, start, start + len(inner)) == FILES


def test_folders_are_left_out_and_an_empty_tar_is_empty():
    folder = (special("b/", tarfile.DIRTYPE), b"")
    assert contents(tar_of([folder, (plain("b/c.jpg", b"1"), b"1")])) == {"b/c.jpg": b"1"}
    assert contents(END) == {}


@given(stop=st.integers(0, len(SMALL)))
def test_a_cut_anywhere_gives_everything_or_an_error(stop):
    whole = content_offset(SMALL, "d.jpg") + 512 + len(END)
    if stop >= whole:
        assert contents(SMALL[:stop]) == FILES
    else:
        with pytest.raises(SourceError, match=r"x\.tar: cut at byte \d+"):
            contents(SMALL[:stop])


@settings(max_examples=100)
@given(
    member=st.sampled_from(list(FILES)),
    position=st.integers(0, BLOCK - 1),
    bit=st.integers(0, 7),
    start=st.booleans(),
)
def test_a_flipped_header_bit_never_makes_a_shorter_archive(member, position, bit, start):
    data = bytearray(END * start + SMALL)
    data[len(END) * start + content_offset(SMALL, member) - BLOCK + position] ^= 1 << bit
    with suppress(SourceError):
        assert contents(bytes(data), len(END) * start) == FILES


D = content_offset(SMALL, "d.jpg")
C = content_offset(SMALL, "b/c.jpg") - BLOCK
LONG = plain("a.jpg", b"1")
LONG.pax_headers = {"comment": "c" * (2 << 20)}
BACKWARDS = plain("b.jpg", b"")
BACKWARDS.size = -512
DAMAGED = {
    # it leads other readers backwards: they stop in silence, or never
    "a negative size": (
        BACKWARDS.tobuf(tarfile.GNU_FORMAT) + SMALL,
        "member 'b.jpg' at byte 0 has the size -512",
    ),
    "a damaged header": (
        SMALL[: D - BLOCK] + b"?" * BLOCK + SMALL[D:],
        f"bad tar header at byte {D - BLOCK} ",
    ),
    "a cut member": (SMALL[: D + 5], f"cut at byte {D + 5} inside 'd.jpg', .* at byte {D} "),
    "a block of zeros": (SMALL[:C] + bytes(BLOCK) + SMALL[C + BLOCK :], f"byte {C}"),
    "two blocks of zeros": (
        SMALL[:C] + bytes(2 * BLOCK) + SMALL[C + 2 * BLOCK :],
        f"before byte {C + 1024}, then",
    ),
    "joined tars": (SMALL + tar_bytes({"e.jpg": b"e"}), "several were joined"),
    "a header that asks for much memory": (
        tar_of([(LONG, b"1")], tarfile.PAX_FORMAT),
        "extension headers are longer",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_an_error_that_says_where(name):
    data, message = DAMAGED[name]
    with pytest.raises(SourceError, match=rf"x\.tar: .*({message})"):
        contents(data)


@pytest.mark.parametrize(
    ("info", "content", "reason"),
    [
        (special("a.jpg", tarfile.SYMTYPE, "z.jpg"), b"", "link to 'z.jpg'"),
        (special("a.jpg", tarfile.CHRTYPE), b"", "no regular file"),
        (*sparse(), "sparse"),
        (plain("a..b/c...jpg", b"1"), b"1", None),
    ],
)
def test_what_is_no_plain_file_is_refused_with_its_reason(info, content, reason):
    data = tar_of([(info, content), (plain("z.jpg", b"z"), b"z")], tarfile.PAX_FORMAT)
    first, last = walk(io.BytesIO(data), "x.tar")
    assert reject_reason(last) is None
    assert (reject_reason(first) is None) if reason is None else (reason in reject_reason(first))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/etc/a.jpg", "absolute"),
        ("\\a.jpg", "absolute"),
        ("a/../../b.jpg", "climbs"),
        ("a\\..\\b.jpg", "climbs"),
    ],
)
def test_a_name_that_leads_out_of_its_folder_is_refused(name, reason):
    # Programs that extract such a file write elsewhere, so no tar here has one.
    assert reason in reject_reason(plain(name, b"1"))


# --- compressed tars, of which small members are read by their names

UNPACKED = {name.rpartition("/")[2]: content for name, content in FILES.items()}
MIB = 1 << 20


def unpacked(data: bytes, **options) -> dict[str, bytes]:
    return read_members(io.BytesIO(data), "x.tgz", [*UNPACKED, "absent"], **options)


def header(kind: bytes, num_bytes: int) -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, num_bytes
    return info.tobuf(tarfile.GNU_FORMAT)


def test_the_named_files_are_read_and_a_link_is_not_one():
    assert (
        unpacked(gzip.compress(special("absent", tarfile.SYMTYPE, "a.jpg").tobuf() + SMALL))
        == UNPACKED
    )
    assert read_members(io.BytesIO(gzip.compress(SMALL)), "x", ["c.jpg", "d"]) == {"c.jpg": b""}


@given(st.integers(0, len(gzip.compress(SMALL)) - 1), st.integers(1, 255))
def test_a_changed_byte_of_a_compressed_tar_is_an_error_or_changes_nothing_and_a_cut_is_an_error(
    position, change
):
    data = bytearray(gzip.compress(SMALL, mtime=0))
    with pytest.raises(SourceError, match=r"x\.tgz: cut or damaged"):
        unpacked(bytes(data[:position]) or b"\x1f")
    data[position % len(data)] ^= change
    with suppress(SourceError):
        assert unpacked(bytes(data)) == UNPACKED


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(tarfile.REGTYPE, 1 << 40) + SMALL, "cut at byte 50000 inside 'x'"),
        (SMALL + bytes(100_000), "unpacks to more than 50000 bytes"),
        *(
            (header(kind, 16 * MIB) + bytes(16 * MIB), "extension headers are longer than 1048576")
            for kind in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE)
        ),
    ],
)
def test_a_tar_that_unpacks_to_much_is_refused_before_it_is_read(content, message):
    data = gzip.compress(content, compresslevel=1)
    limits = {} if "extension" in message else {"max_bytes": 50_000}
    tracemalloc.start()
    with pytest.raises(SourceError, match=rf"x\.tgz: .*{message}"):
        unpacked(data, **limits)
    assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    tracemalloc.stop()


def test_many_members_are_not_kept():
    data = gzip.compress(5_000 * header(tarfile.REGTYPE, 0) + SMALL, compresslevel=1)
    tracemalloc.start()
    assert unpacked(data) == UNPACKED
    assert tracemalloc.get_traced_memory()[1] < 2 * MIB
    tracemalloc.stop()
