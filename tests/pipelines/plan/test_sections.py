"""A large tar in sections: whatever is in it, they join to the table that one worker writes."""

import io
import tarfile
import uuid
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import build as builds
from pipelines.check.verify import verify
from pipelines.config import BuildConfig
from pipelines.plan import paths, tables
from pipelines.plan.files import PlanFiles
from pipelines.plan.index import index_unit
from pipelines.plan.sections import index_section, join_sections
from pipelines.plan.survey import sections_in, write_units
from pipelines.runners import options
from pipelines.sources.formats.tar import BLOCK, END
from pipelines.sources.webdataset import WebDataset, find_tars
from shardset.errors import SourceError
from shardset.storage.base import Storage
from shardset.storage.memory import MemoryStorage
from shardset.storage.open import open_storage
from tests.makers.doors import told
from tests.makers.odd_images import png
from tests.makers.shardset import put
from tests.makers.stored import files_of
from tests.makers.tars import plain, special, tar_bytes

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
CONFIG = BuildConfig(source="webdataset", input="", output="", verify="none")
HERE = ["--direct_running_mode=in_memory"]


def source_of(data: bytes) -> WebDataset:
    """The source of one tar in memory."""
    storage = MemoryStorage(uuid.uuid4().hex)
    put(storage, "train.tar", data)
    return WebDataset(storage)


def prepared(source: WebDataset, output: Storage) -> tuple[PlanFiles, list]:
    """A build of which the survey is written, and the sections of its only unit."""
    lines = io.BytesIO()
    units = write_units(source.survey().units, lines)
    put(output, paths.SURVEY, lines.getvalue())
    [block] = units.blocks
    return PlanFiles(output, "0123456789abcdef"), list(sections_in(output, block, source.num_sections))


def outcome(files: PlanFiles, summary: object) -> tuple:
    table = tables.unit_from_bytes(files.read(paths.unit_path(0)))
    return tables.rows_of(table), tables.rejected_of(table), table["key_hash"].to_pylist(), summary


def whole(source: WebDataset, config: BuildConfig = CONFIG) -> tuple | str:
    """What one worker finds in a tar, or its error."""
    files, [section] = prepared(source, MemoryStorage(uuid.uuid4().hex))
    try:
        return outcome(files, index_unit(files, source, config, section.unit))
    except SourceError as error:
        return str(error)


def joined(source: WebDataset, section_bytes: int, config: BuildConfig = CONFIG) -> tuple[tuple | str, int]:
    """What sections come to, the last one first, and how many were indexed again."""
    source = replace(source, section_bytes=section_bytes)
    files, sections = prepared(source, MemoryStorage(uuid.uuid4().hex))
    try:
        for section in reversed(sections):
            index_section(files, source, config, section)
        summary, num_again = join_sections(files, source, config, sections[0].unit)
    except SourceError as error:
        return str(error), 0
    return outcome(files, summary), num_again


def block_of(info: tarfile.TarInfo, content: bytes = b"", format: int = tarfile.PAX_FORMAT) -> bytes:
    return info.tobuf(format) + content + bytes(-len(content) % BLOCK)


def old(block: bytes) -> bytes:
    """A header of the time before USTAR, which has no mark."""
    head = bytearray(block[:BLOCK])
    head[257:265], head[148:156] = bytes(8), b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + block[BLOCK:]


KEYS = st.sampled_from(["a", "b", "c/d", "e" * 90, "long/" + "f" * 130, "ä/ö", "g", "h", "__meta__/i"])
SIZES = st.sampled_from([0, 1, 40, 511, 512, 513, 900, 2048, 5000])


@st.composite
def samples(draw) -> bytes:
    """The members of one sample, which are neighbours."""
    key, format = draw(KEYS) + draw(st.sampled_from(["", "1", "2", "3"])), draw(st.sampled_from(FORMATS[1:]))
    data = b""
    for field in draw(st.lists(st.sampled_from(["jpg", "png", "npy", "cls"]), min_size=1, max_size=4)):
        content = b"7" if field == "cls" else bytes(draw(SIZES))
        data += block_of(plain(f"{key}.{field}", content), content, format)
    return data


@st.composite
def nested(draw) -> bytes:
    """A member that is a tar."""
    content = b"".join(draw(st.lists(samples(), max_size=6))) + draw(st.sampled_from([b"", END]))
    return block_of(plain(draw(KEYS) + ".bin", content), content)


OTHERS = st.sampled_from([
    block_of(special("folder", tarfile.DIRTYPE)),
    block_of(special("a.jpg", tarfile.SYMTYPE, "b")),
    block_of(plain("readme", b"text"), b"text"),
    old(block_of(plain("old.jpg", b"123"), b"123")),
    tarfile.TarInfo.create_pax_global_header({"comment": "of somebody"}),
    tarfile.TarInfo.create_pax_global_header({"path": "x/named.jpg"}),
])  # fmt: skip
TARS = st.builds(
    lambda members, padding: b"".join(members) + END + bytes(padding * BLOCK),
    st.lists(st.one_of(samples(), samples(), samples(), nested(), OTHERS), max_size=24),
    st.integers(0, 20),
)
SECTIONS = st.sampled_from([512, 1024, 2048, 4096, 16384])


@given(TARS, SECTIONS)
def test_sections_of_any_tar_join_to_what_one_worker_finds(data, section_bytes):
    source = source_of(data)
    assert joined(source, section_bytes)[0] == whole(source)


@given(TARS, SECTIONS, st.data())
def test_damage_is_the_same_error_in_sections(data, section_bytes, draw):
    at = draw.draw(st.integers(0, len(data) - 1))
    damaged = draw.draw(st.sampled_from([data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]]))
    source = source_of(damaged)
    assert joined(source, section_bytes)[0] == whole(source)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [20, 3000])
def test_no_section_of_a_usual_tar_is_indexed_again(format, size):
    folder = "f" * (60 if format == tarfile.USTAR_FORMAT else 120)
    files = [
        (f"{folder}/{number:05d}.{field}", bytes(size + number * 37 % 1000) if field == "jpg" else b"3")
        for number in range(300)
        for field in ("jpg", "cls")
    ]
    source = source_of(tar_bytes(files, format))
    found, num_again = joined(source, 1 << 15)
    assert (found, num_again) == (whole(source), 0)
    assert replace(source, section_bytes=1 << 15).num_sections(source.survey().units[0]) > 15


def test_a_tar_in_a_tar_that_misleads_the_search_is_found_out():
    inner = tar_bytes([(f"{number}.jpg", bytes(700)) for number in range(40)])
    after = [(f"{name}.jpg", bytes(3000)) for name in "cdefghij"]
    source = source_of(tar_bytes([("a.jpg", b"1"), ("b.bin", inner), *after]))
    found, num_again = joined(source, 40 << 10)
    assert found == whole(source)
    assert [row.key for row in found[0]] == [*"abcdefghij"]
    assert num_again > 0


def test_a_key_that_came_in_an_earlier_section_is_rejected_as_in_a_whole_tar():
    names = [f"{number:03d}.jpg" for number in range(60)] + ["007.jpg", "060.jpg"]
    source = source_of(tar_bytes([(name, bytes(900)) for name in names]))
    found, num_again = joined(source, 1 << 14)
    assert (found, num_again) == (whole(source), 1)
    assert [entry["reason"] for entry in found[1]] == ["its key came before in this tar, and not right before"]


@pytest.mark.parametrize("size", [4096, 4097, 100_000])
def test_a_tar_is_cut_where_it_is_two_sections_or_more(size):
    source = WebDataset(MemoryStorage("any"), section_bytes=2048)
    assert source.num_sections({"num_bytes": size}) == size // 2048
    assert source.num_sections({"num_bytes": 4095}) == source.num_sections({"num_bytes": 0}) == 1


def test_a_section_that_is_indexed_is_not_indexed_again_after_a_stop():
    source = replace(source_of(tar_bytes([(f"{n}.jpg", bytes(3000)) for n in range(20)])), section_bytes=1 << 14)
    files, sections = prepared(source, MemoryStorage(uuid.uuid4().hex))
    for section in sections:
        index_section(files, source, CONFIG, section)
    source.input.delete("train.tar")
    for section in sections:
        index_section(files, source, CONFIG, section)
    summary, _ = join_sections(files, source, CONFIG, sections[0].unit)
    for section in sections:
        files.output.delete(paths.section_path(0, section.number))
        index_section(files, source, CONFIG, section)
    assert join_sections(files, source, CONFIG, sections[0].unit) == (summary, 0)
    files.output.delete(paths.summary_path(0))
    assert join_sections(files, source, CONFIG, sections[0].unit) == (summary, 0)


def members(num_samples: int) -> list[tuple[str, bytes]]:
    """Images with captions that are too long for a row, one bad image, a key that comes again, and a tar."""
    found = [
        (f"{number:03d}.{field}", content)
        for number in range(num_samples)
        for field, content in (("png", png(number)), ("txt", b"%d " % number * 500), ("cls", b"%d" % (number % 3)))
    ]
    inner = tar_bytes([(f"{number:03d}.png", png(number)) for number in range(50)])
    return [*found, ("bad.png", b"<html>"), ("003.png", png(3)), ("z.png", png(90)), ("z.tar", inner), *members_after()]


def members_after() -> list[tuple[str, bytes]]:
    return [(f"after/{number}.png", png(number)) for number in range(12)]


def made(tar: str, output: Storage, section_bytes: int | None) -> dict[str, bytes]:
    """The files of a set of the tar."""
    config = BuildConfig(
        source="webdataset", input=tar, output=output.url, num_shards={"": 3}, max_bad_fraction=0.5, seed=4
    )
    build = builds.prepare(config, output)
    source = WebDataset(*find_tars(tar), **({"section_bytes": section_bytes} if section_bytes else {}))
    builds.run(replace(build, source=source), options.beam_options(HERE, output))
    return files_of(output.url)


def test_a_build_in_sections_writes_the_same_set_also_after_a_stop(tmp_path):
    (tmp_path / "train.tar").write_bytes(tar_bytes(members(40)))
    tar = str(tmp_path / "train.tar")
    undisturbed = made(tar, open_storage(f"memory://{uuid.uuid4().hex}"), None)
    inner, indexed = open_storage(f"memory://{uuid.uuid4().hex}"), []

    def stop(verb: str, name: str) -> None:
        if verb == "closed" and name.startswith(paths.section_path(0, 0)[:-9]):
            indexed.append(name)
            if len(indexed) == 4:
                raise SourceError("stopped here")

    with pytest.raises(SourceError, match="stopped here"):
        made(tar, told(inner, uuid.uuid4().hex, stop), 1 << 14)
    assert made(tar, told(inner, uuid.uuid4().hex, lambda verb, name: stop(verb, name)), 1 << 14) == undisturbed
    assert len(indexed) == len(set(indexed)) > 8
    assert verify(inner.url, deep=True).problems == ()
