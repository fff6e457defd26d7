"""Byte ranges between two steps: what is read back is compared with length and CRC32C, twice before
it is damaged.
"""

import uuid

import pytest

from pipelines.plan.files import PlanFiles, read_range, write_slices
from shardset.checksum import crc32c_of
from shardset.errors import ConfigError
from shardset.storage.open import open_storage
from tests.makers.doors import changing

CONTENT = b"\xab\x9b\xe0\x9b"
"""Its CRC32C is that of no bytes, so only its length tells the two apart."""


@pytest.fixture
def output():
    return open_storage(f"memory://{uuid.uuid4().hex}")


def test_a_range_that_comes_short_is_read_again_and_is_damaged_if_it_does_so_twice(output):
    assert crc32c_of(CONTENT) == crc32c_of(b"")
    [(_, byte_range)] = write_slices(
        PlanFiles(output, "0123456789abcdef"), "plan/slices/keys-0000000.bin", [(0, CONTENT)]
    )
    answers = iter([b"", CONTENT])
    assert (
        read_range(changing(output, uuid.uuid4().hex, lambda *_: next(answers)), byte_range)
        == CONTENT
    )
    with pytest.raises(
        ConfigError, match=r"keys-0000000\.bin: .* are 0 with the CRC32C .* read twice.*damaged"
    ):
        read_range(changing(output, uuid.uuid4().hex, lambda *_: b""), byte_range)
