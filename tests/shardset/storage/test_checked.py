"""Objects that are compared with what is listed, and asked for a second time."""

import itertools

import pytest

from shardset.errors import ManifestError
from shardset.storage.checked import DamagedObject, facts_of, read_object, read_twice
from shardset.storage.open import open_storage
from tests.makers.shardset import put

CONTENT = b"hello world"


@pytest.mark.parametrize(("fitting", "found"), [(0, 0), (1, 1), (7, 1)])
def test_what_does_not_fit_is_read_twice_and_no_more(fitting, found):
    numbers = itertools.count()
    assert read_twice(lambda: next(numbers), lambda number: number == fitting) == found
    assert next(numbers) == found + 1


def test_what_raises_is_read_twice_and_no_more():
    errors = [ManifestError("first"), ManifestError("second")]

    def read():
        raise errors.pop(0)

    with pytest.raises(ManifestError, match="second"):
        read_twice(read, error=ManifestError)
    assert errors == []


def test_an_object_that_is_damaged_where_it_stands_is_an_error_that_holds_its_bytes():
    storage = open_storage("memory://checked")
    put(storage, "a", b"hallo")
    with pytest.raises(
        DamagedObject, match=r"/a: 5 bytes with crc32c .*, expected 11 with .*; rebuild it"
    ) as caught:
        read_object(storage, "a", *facts_of(CONTENT), "rebuild it")
    assert caught.value.data == b"hallo"
