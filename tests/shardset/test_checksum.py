"""One checksum, however the bytes come."""

import google_crc32c
import pytest

from shardset.checksum import crc32c_of, extend_crc32c

SIZES = [0, 1, 2**18 - 1, 2**18, 2**18 + 1, 3 * 2**18 + 5]


@pytest.mark.parametrize("size", SIZES)
def test_a_view_has_the_checksum_of_its_bytes(size):
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    assert extend_crc32c(7, memoryview(data)) == google_crc32c.extend(7, data)
    assert crc32c_of(memoryview(data)[: size // 2], data[size // 2 :]) == google_crc32c.value(data)
