"""Tar bytes and indexes: frozen, read alike by every reader of tars, and no damage passes."""

import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import google_crc32c
import pyarrow as pa
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from webdataset.tariterators import tar_file_iterator

from shardset.checksum import crc32c_text
from shardset.errors import ConfigError, DamagedShard
from shardset.format import manifest as manifests
from shardset.format import table
from shardset.format.images import is_image_field
from shardset.format.naming import MANIFEST, is_key
from shardset.format.rows import fields_of, from_bytes
from shardset.format.shards import SHARD_DTYPE, TAR_FACTS
from shardset.format.tar import (
    BLOCK,
    END,
    StoredSample,
    TarBuilder,
    TarMember,
    header,
    members,
    sample_members,
)
from tests.makers import golden
from tests.makers.objects import flipped
from tests.makers.tars import special, tar_bytes, tar_of

SHARD = golden.FOLDER / "train/train-000000.tar"
SMALL = (golden.FOLDER / "validation/validation-000000.tar").read_bytes()
SMALL_INDEX = (golden.FOLDER / "validation/validation-000000.parquet").read_bytes()
SAMPLES = golden.samples()["train"][:2]

keys = st.from_regex(r"[A-Za-z0-9_+=-]{1,20}(/[A-Za-z0-9_+=-]{1,20}){0,2}", fullmatch=True)
contents = st.dictionaries(
    st.sampled_from(["jpg", "cls", "seg.png", "json"]), st.binary(max_size=1100), min_size=1
)
samples = st.dictionaries(keys, contents, min_size=1, max_size=4).map(
    lambda found: [
        StoredSample(key=key, fields=list(fields.items()), label=-1, serial=number)
        for number, (key, fields) in enumerate(found.items())
    ]
)


def shard_of(found: Sequence[StoredSample], fields: Sequence[str] = ()) -> tuple[bytes, pa.Table]:
    builder = TarBuilder(fields)
    data = b"".join([*(builder.add(sample) for sample in found), builder.finish()])
    assert builder.num_bytes == len(data)
    assert builder.sha256 == hashlib.sha256(data).hexdigest()
    assert builder.crc32c == crc32c_text(google_crc32c.value(data))
    return data, builder.take_index()


def files_of(found: Sequence[StoredSample]) -> dict[str, bytes]:
    """member name -> content, in tar order."""
    return {
        f"{sample.key}.{field}": bytes(content)
        for sample in found
        for field, content in sample.fields
    }


def crcs(data: bytes, found: list[list[TarMember]]) -> list[int]:
    """The CRC32C of each sample's contents in member order, from the tar alone."""
    return [
        google_crc32c.value(
            b"".join(data[member.offset : member.offset + member.num_bytes] for member in group)
        )
        for group in found
    ]


def with_checksum(block: bytes) -> bytes:
    """A header whose checksum is right again after something in it was forged."""
    blank = block[:148] + b" " * 8 + block[156:]
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:]


# -- the format is fixed
# ----------------------------------------------------------------------------------------


def facts_of(name: str, data: bytes) -> object:
    """What a file says, whatever version of Arrow wrote the indexes."""
    if name.endswith(".parquet"):
        return parquet.read_table(pa.BufferReader(data))
    if name.endswith(".npy"):
        return table.rows_of(data, SHARD_DTYPE)[TAR_FACTS].tolist()
    return manifests.parse(data).digest if name == MANIFEST else data


@pytest.mark.parametrize("name", golden.shard_set_files())
def test_every_file_of_the_golden_set_is_frozen(name):
    # The digest of its manifest is frozen too, and that names the checksums of all tars.
    made, kept = golden.shard_set_files()[name], (golden.FOLDER / name).read_bytes()
    assert facts_of(name, made) == facts_of(name, kept), golden.REGENERATE


def gnu_tar(*arguments: str, folder: Path = golden.FOLDER) -> bytes:
    environment = {**os.environ, "TZ": "UTC", "LC_ALL": "C"}
    return subprocess.run(
        ["tar", *arguments], env=environment, cwd=folder, capture_output=True, check=True
    ).stdout


def test_the_bytes_are_those_of_gnu_tar(tmp_path):
    for name, content in files_of(SAMPLES).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    facts = ["--owner=0", "--group=0", "--numeric-owner", "--mode=0644", "--mtime=@0"]
    made = gnu_tar("-c", "--format=ustar", "-b", "1", *facts, *files_of(SAMPLES), folder=tmp_path)
    assert made == SHARD.read_bytes()


@pytest.mark.parametrize(("name", "num_bytes"), [(b"k" * 101, 1), (b"a.jpg", 8**11)])
def test_a_header_that_would_need_another_format_is_refused(name, num_bytes):
    with pytest.raises(ConfigError, match="does not fit a USTAR header"):
        header(name, num_bytes)


# -- other readers
# ----------------------------------------------------------------------------------------------


def test_stock_webdataset_reads_a_shard():
    found = list(webdataset.WebDataset(str(SHARD), shardshuffle=False))
    assert [sample["__key__"] for sample in found] == [sample.key for sample in SAMPLES]
    for sample, stored in zip(found, SAMPLES, strict=True):
        assert {name: sample[name] for name in sample if not name.startswith("__")} == dict(
            stored.fields
        )


@given(st.from_regex(r"[a_]{0,5}(/[a_]{1,5}){0,2}", fullmatch=True).filter(is_key))
def test_stock_webdataset_leaves_out_no_sample_for_its_key(key):
    data, _ = shard_of([StoredSample(key=key, fields=[("jpg", b"x")], label=0, serial=0)])
    [found] = tar_file_iterator(io.BytesIO(data))
    assert found["fname"] == f"{key}.jpg"


@settings(max_examples=30, deadline=None)
@given(found=samples)
def test_tarfile_and_members_agree_on_any_samples(found):
    data, _ = shard_of(found)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = [(info.name, info.offset, info.offset_data, info.size) for info in tar]
    walked = [
        (f"{m.key}.{m.field}", m.header_offset, m.offset, m.num_bytes)
        for m in members(data, "here")
    ]
    assert walked == expected


# -- the index
# --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(samples)
def test_every_field_stands_where_the_index_says(found):
    data, index = shard_of(found, ["cls", "jpg"])
    groups = list(sample_members(members(data, "here")))
    assert index["crc32c"].to_pylist() == crcs(data, groups)
    fields = fields_of(index.column_names)
    assert fields[:2] == ["cls", "jpg"]
    for row, sample in zip(index.to_pylist(), found, strict=True):
        for name in ("key", "label", "serial", "copy"):
            assert row[name] == getattr(sample, name)
        images = [bytes(content) for name, content in sample.fields if is_image_field(name)]
        assert row["image_crc32c"] == google_crc32c.value(images[0] if images else b"")
        for name in fields:
            offset, num_bytes = row[f"{name}.offset"], row[f"{name}.bytes"]
            expected = dict(sample.fields).get(name)
            assert (data[offset : offset + num_bytes] if offset else None) == expected


# --- damage ---------------------------------------------------------------------------------------


def check(data: bytes, index: pa.Table) -> None:
    """Raises DamagedShard unless `data` is a shard with the contents that `index` lists."""
    groups = list(sample_members(members(data, "here")))
    if crcs(data, groups) != index["crc32c"].to_pylist():
        raise DamagedShard("contents")


def test_every_flipped_bit_of_a_shard_is_found():
    index = from_bytes(SMALL_INDEX, 1, "here")
    check(SMALL, index)
    for place in range(len(SMALL)):
        for bit in range(8):
            with pytest.raises(DamagedShard):
                check(flipped(SMALL, place, 1 << bit), index)


@settings(deadline=None)
@given(samples, st.data())
def test_a_run_of_lost_or_foreign_bytes_is_found(found, data):
    tar, index = shard_of(found)
    start = data.draw(st.integers(0, len(tar) - 1))
    stop = data.draw(st.integers(start, min(len(tar), start + 1500)))
    patched = tar[:start] + data.draw(st.binary(max_size=40)) + tar[stop:]
    if patched != tar:
        with pytest.raises(DamagedShard):
            check(patched, index)


@pytest.mark.parametrize(
    "data",
    [
        SMALL + bytes(BLOCK),
        SMALL[: -len(END)] + bytes(BLOCK) + SMALL,
        tar_bytes({"a.jpg": b"1"}, tarfile.GNU_FORMAT),
        tar_bytes({"ä.jpg": b"1"}, tarfile.PAX_FORMAT),
        tar_bytes({"k" * 120 + ".jpg": b"1"}, tarfile.GNU_FORMAT),
        tar_of([(special("a.jpg", tarfile.SYMTYPE, "b.jpg"), b"")]),
        tar_of([(special("a", tarfile.DIRTYPE), b"")]),
        tar_bytes({"a b.jpg": b"1"}),
        tar_bytes({"a": b"1"}),
    ],
)
def test_tars_that_our_writer_does_not_write_are_refused(data):
    with pytest.raises(DamagedShard, match=r"here: (header|the end|cut) at byte"):
        list(members(data, "here"))


@pytest.mark.parametrize(
    ("place", "forged", "said"),
    [
        (100, b"0000755", "is not what was written for b'a"),  # its mode
        (136, b"00000000001", "is not what was written for b'a"),  # its time
        (156, b"5", "is not what was written for b'a"),  # its kind
        (265, b"root", "is not what was written for b'a"),  # its owner
        (124, b"-0000000000", "has no valid size"),  # another sends other readers back, for ever
        (124, b"0_000000010", "has no valid size"),
    ],
)
def test_a_forged_header_is_refused_even_if_its_checksum_fits(place, forged, said):
    block = header(b"a.jpg", 8)
    other = with_checksum(block[:place] + forged + block[place + len(forged) :])
    assert tarfile.TarInfo.frombuf(other, "utf-8", "strict").name == "a.jpg"
    with pytest.raises(DamagedShard, match=f"header at byte 0 {said}"):
        list(members(other + bytes(BLOCK) + END, "here"))
