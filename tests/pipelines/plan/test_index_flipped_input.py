"""A bit that is flipped once on its way from a bucket, while the input is surveyed and indexed,
changes no name, label or text.

The door flips no whole object: of these the bucket says the checksum, which
tests/shardset/storage/test_base.py shows with a proxy. A disk has no checksums, so it is
trusted, and Parquet files need not have any.
"""

import json
import tarfile
import uuid
from dataclasses import dataclass, replace

import numpy as np
import pytest

from pipelines.config import BuildConfig
from pipelines.plan import paths, tables
from pipelines.plan.files import PlanFiles
from pipelines.plan.index import index_unit
from pipelines.plan.plan_records import Build, BuildFile
from pipelines.plan.survey import units_in, write_units
from pipelines.sources.formats.range_file import WINDOW_BYTES
from pipelines.sources.imagenet import ImageNet
from pipelines.sources.listing import Listing
from pipelines.sources.webdataset import WebDataset
from shardset.storage.memory import MemoryStorage
from tests.makers import imagenet
from tests.makers.doors import changing
from tests.makers.images import image_bytes
from tests.makers.objects import put
from tests.makers.tars import tar_bytes

MOST_FLIPS = 20
FLIPS_OF_LONG_LISTINGS = 5


def tars(storage):
    long = "long-" * 30
    files = {}
    for number in range(4):
        key = f"{long}{number}" if number == 2 else f"{number}"
        files |= {
            f"{key}.png": image_bytes(number),
            f"{key}.cls": b"%d" % number,
            f"{key}.json": (
                json.dumps({"label": number, "note": "n" * (5000 * (number == 3))}).encode()
            ),
        }
    files["4.png"], files["4.cls"] = image_bytes(4), b"seven"
    put(storage, "train-000.tar", tar_bytes(files, tarfile.PAX_FORMAT))
    return WebDataset(storage)


def archives(storage):
    for name, content in imagenet.archives(imagenet.images()).items():
        put(storage, name, content)
    return ImageNet(storage)


def listed(storage, num_rows, num_note_bytes):
    """Rows with notes, of three images."""
    rows = [
        {"path": f"{number % 3}.png", "label": f"class {number % 3}", "note": "n" * num_note_bytes}
        for number in range(num_rows)
    ]
    for row in rows:
        put(storage, row["path"], image_bytes(0))
    return rows


def jsonl(storage):
    rows = listed(storage, 45, WINDOW_BYTES // 40)
    put(storage, "all.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return Listing(storage, "all.jsonl")


SOURCES = {
    "tars": tars,
    "imagenet": archives,
    "jsonl": jsonl,
}


@dataclass
class FlipsOnce:
    """Flips one bit of the byte `at` among all that are read in ranges; counts them."""

    sizes: dict[str, int]
    at: int = -1
    num_bytes: int = 0

    def __call__(self, call, data):
        name, start, stop = call.rsplit(" ", 2)
        if start == "0" and stop in ("None", str(self.sizes.get(name))):
            return data
        before, self.num_bytes = self.num_bytes, self.num_bytes + len(data)
        at = self.at - before
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if 0 <= at < len(data) else data


def surveyed_and_indexed(source, **options):
    """The classes, rows, rejected samples and spooled bytes of an input."""
    config = BuildConfig(source="", input="", output="", **options)
    output = MemoryStorage(uuid.uuid4().hex)
    files, survey = PlanFiles(output, "build"), source.survey()
    with output.writer(paths.SURVEY) as out:
        written = write_units(survey.units, out)
    units = [unit for block in written.blocks for unit in units_in(output, block)]
    file = BuildFile(
        tool="", options={}, survey="", num_units=len(units), suffix="", classes=None, notes=[]
    )
    build = Build(config=config, source=source, files=files, file=file)
    for unit in units:
        index_unit(build, unit)
    found = [*tables.read_units(files, [unit.number for unit in units])]
    rows = [row for table in found for row in tables.rows_of(table)]
    spools = [output.read(stat.name) for stat in output.list() if "spool" in stat.name]
    return survey.classes, rows, [tables.rejected_of(table) for table in found], spools


def flips_of(source, **options):
    """What is indexed undisturbed, and the same with each of many bits flipped."""
    sizes = {stat.name: stat.num_bytes for stat in source.input.list()}

    def behind(flips):
        door = changing(source.input, uuid.uuid4().hex, flips)
        return surveyed_and_indexed(replace(source, input=door), **options)

    counting = FlipsOnce(sizes)
    undisturbed = behind(counting)
    assert counting.num_bytes
    num_flips = FLIPS_OF_LONG_LISTINGS if counting.num_bytes > WINDOW_BYTES else MOST_FLIPS
    for at in (
        np.random.default_rng(0).choice(counting.num_bytes, num_flips, replace=False).tolist()
    ):
        yield at, undisturbed, behind(FlipsOnce(sizes, at))


@pytest.mark.parametrize("kind", ["tars", "jsonl"])
def test_a_bit_that_is_flipped_once_while_the_input_is_indexed_changes_nothing(kind):
    source = SOURCES[kind](MemoryStorage(uuid.uuid4().hex))
    for at, undisturbed, found in flips_of(source):
        assert found == undisturbed, at


def without_checksums(found):
    """The same, but for the CRC32C of images, with which the bytes to store are compared."""
    classes, rows, rejected, spools = found
    return classes, tables.digest_of(rows), rejected, spools


@pytest.mark.parametrize("verify", ["none", "decode"])
@pytest.mark.parametrize("kind", ["tars", "imagenet"])
def test_labels_and_texts_of_tars_are_compared_also_where_images_are_not(kind, verify):
    source = SOURCES[kind](MemoryStorage(uuid.uuid4().hex))
    for at, undisturbed, found in flips_of(source, verify=verify):
        assert without_checksums(found) == without_checksums(undisturbed), at
