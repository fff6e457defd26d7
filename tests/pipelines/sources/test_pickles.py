import contextlib
import os
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sources import pickles
from shardset.errors import SourceError
from tests.makers.cifar import pickle_of

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31 - 1) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=4),
)


def dict_of(key: bytes, value: bytes) -> bytes:
    """A pickled dict of one entry, from the opcodes of its key and value."""
    return b"\x80\x02}" + key + value + b"s."


@given(st.dictionaries(st.text("abc", max_size=3), values, max_size=4))
def test_plain_values_of_python_2_come_back_as_the_standard_unpickler_reads_them(value):
    data = pickle_of(value)
    assert pickles.loads(data, "here") == pickle.loads(data, encoding="bytes")


def test_an_array_of_python_2_comes_back_as_the_standard_unpickler_reads_it():
    array = np.arange(12, dtype=np.uint8).reshape(4, 3)
    data = pickle_of({"data": array})
    assert np.array_equal(pickles.loads(data, "here")[b"data"], array)
    assert np.array_equal(pickle.loads(data, encoding="bytes")[b"data"], array)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_pickle_that_was_written_again_by_python_3_is_read_too(protocol):
    array = np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(4, 3))
    value = pickles.loads(pickle.dumps({b"data": array, "labels": [1, 2], b"x": b"\xff"}, protocol), "here")
    assert np.array_equal(value.pop(b"data"), array)
    assert value == {"labels": [1, 2], b"x": b"\xff"}


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (os.system, "touch {}", "posix.system"),
        (eval, "open({!r}, 'w')", "builtins.eval"),
        (open, "{}", "open"),
        (getattr, "{}", "builtins.getattr"),
    ],
)
def test_a_name_outside_the_list_is_refused_by_name_and_not_run(tmp_path, protocol, function, arguments, named):
    mark = tmp_path / "ran"
    data = pickle.dumps({"data": Calls(function, arguments.format(str(mark)), "w")}, protocol)
    with pytest.raises(SourceError, match="nothing of it was run"):
        pickles.loads(data, "here")
    assert not mark.exists()


def test_the_refused_name_is_in_the_message():
    data = dict_of(b"U\x01a", b"cos\nsystem\nU\x04true\x85R")
    with pytest.raises(SourceError, match=r"here: the pickle holds the name os\.system"):
        pickles.loads(data, "here")


@pytest.mark.parametrize("name", ["numpy\nload", "numpy.core.multiarray\nfromfile", "numpy\nndarray.tofile"])
def test_other_names_of_numpy_are_refused(name):
    with pytest.raises(SourceError, match="the name numpy"):
        pickles.loads(dict_of(b"U\x01a", b"c" + name.encode() + b"\n"), "here")


def test_a_dotted_name_does_not_reach_into_an_allowed_one():
    data = pickle.PROTO + b"\x04\x8c\x05numpy\x8c\x14ndarray.__class__.mro\x93."
    data = data.replace(b"\x8c\x14ndarray.__class__.mro", b"\x8c\x15ndarray.__class__.mro")
    with pytest.raises(SourceError, match=r"the name numpy\.ndarray\.__class__\.mro"):
        pickles.loads(data, "here")


@pytest.mark.parametrize("name", [b"numpy\nndarray", b"numpy\ndtype", b"numpy.core.multiarray\n_reconstruct"])
@pytest.mark.parametrize("state", [b"}U\x05_callNs", b"N}X\x05\0\0\0_callNs\x86", b"N}X\x01\0\0\0xNs\x86"])
def test_an_allowed_name_can_not_be_changed_by_a_pickle(name, state):
    with pytest.raises(SourceError, match="not a whole pickle"):
        pickles.loads(b"\x80\x02c" + name + b"\n" + state + b"b.", "here")
    array = np.arange(6, dtype=np.uint8)
    assert np.array_equal(pickles.loads(pickle_of(array), "here"), array)


@pytest.mark.parametrize("opcode", [b"\x82\x01", b"Pid\n", b"(ios\nsystem\n", b"\x96" + b"\xff" * 7 + b"\x0f"])
def test_instructions_that_plain_data_never_needs_are_refused(opcode):
    with pytest.raises(SourceError):
        pickles.loads(b"\x80\x02" + opcode + b".", "here")


def test_a_huge_memo_number_is_refused_before_memory_is_taken():
    with pytest.raises(SourceError, match="memo number of 2147483647"):
        pickles.loads(b"\x80\x02]r" + struct.pack("<I", 2**31 - 1) + b".", "here")


@pytest.mark.parametrize("size", [0, 1, 10, 50, 100, -1])
def test_a_cut_pickle_is_an_error_that_says_so(size):
    data = pickle_of({"data": np.zeros((2, 3), np.uint8), "labels": [1, 2], "more": "x" * 300})
    with pytest.raises(SourceError, match="here: not a whole pickle"):
        pickles.loads(data[:size], "here")


@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_a_source_error(data):
    with contextlib.suppress(SourceError):
        pickles.loads(b"\x80\x02" + data, "here")


@given(st.integers(0, 400), st.integers(0, 255))
def test_any_changed_byte_gives_a_value_or_a_source_error(position, byte):
    data = bytearray(pickle_of({"data": np.zeros((2, 3), np.uint8), "labels": [1, 2], "names": ["a", "b"]}))
    data[position % len(data)] = byte
    with contextlib.suppress(SourceError):
        pickles.loads(bytes(data), "here")


@pytest.mark.parametrize(
    "array", [np.zeros(3, np.float64), np.zeros(3, np.int8), np.array(["a"], dtype="S1"), np.zeros(2, np.uint16)]
)
def test_an_array_of_another_type_is_refused(array):
    with pytest.raises(SourceError, match="unsigned bytes"):
        pickles.loads(pickle_of({"data": array}), "here")


def test_an_array_whose_shape_does_not_fit_its_bytes_is_refused():
    data = pickle_of(np.zeros((2, 3), np.uint8)).replace(b"K\x02K\x03\x86", b"K\x02K\x04\x86")
    with pytest.raises(SourceError, match="6 bytes for an array of shape"):
        pickles.loads(data, "here")
