"""The units of a survey: written in blocks, found again one by one."""

import io
import uuid

import pytest

from pipelines.plan import paths
from pipelines.plan.survey import read_unit, units_in, write_units
from shardset.errors import ConfigError
from shardset.storage.memory import MemoryStorage
from tests.makers.doors import changing

UNITS = [{"tar": f"{n}.tar", "name": "x" * n, "odd": "\u2028\x85\x0b\r"} for n in range(40)]


def written(block_bytes):
    output, lines = MemoryStorage(uuid.uuid4().hex), io.BytesIO()
    units = write_units(UNITS, lines, block_bytes)
    output.write(paths.SURVEY, lines.getvalue())
    return output, units


@pytest.mark.parametrize("block_bytes", [1, 100, 500, 1 << 20])
def test_every_unit_is_in_one_block_under_its_number(block_bytes):
    output, units = written(block_bytes)
    refs = [ref for block in units.blocks for ref in units_in(output, block)]
    assert [ref.number for ref in refs] == list(range(len(UNITS)))
    assert [read_unit(output, ref) for ref in refs] == UNITS
    assert units.num_units == len(UNITS)
    assert units.digest == written(200)[1].digest
    assert max(block.stop - block.start for block in units.blocks) < block_bytes + 200


def test_a_block_that_is_damaged_is_named():
    output, units = written(500)
    damaged = changing(output, uuid.uuid4().hex, lambda _, data: data[:-1] + b"x")
    with pytest.raises(ConfigError, match=r"plan/survey\.jsonl: not readable .*read twice"):
        list(units_in(damaged, units.blocks[0]))
