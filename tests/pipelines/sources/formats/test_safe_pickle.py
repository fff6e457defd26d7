import contextlib
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sources.formats import safe_pickle
from shardset.errors import SourceError
from tests.makers.cifar import pickle_of

plain = st.integers(-(2**31), 2**31 - 1) | st.binary(max_size=300)


def dict_of(key: bytes, value: bytes) -> bytes:
    """A pickled dict of one entry, from the opcodes of its key and value."""
    return b"\x80\x02}" + key + value + b"s."


@settings(max_examples=30)
@given(st.dictionaries(st.text("abc", max_size=3), plain | st.lists(plain), max_size=4))
def test_plain_values_of_python_2_come_back_as_the_standard_unpickler_reads_them(value):
    assert safe_pickle.loads(pickle_of(value), "here") == value


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_pickle_that_was_written_again_by_python_3_is_read_too(protocol):
    array = np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(4, 3))
    value = safe_pickle.loads(
        pickle.dumps({b"data": array, "labels": [1, 2], b"x": b"\xff"}, protocol), "here"
    )
    assert np.array_equal(value.pop("data"), array)
    assert value == {"labels": [1, 2], "x": b"\xff"}
    assert safe_pickle.loads(b"\x80\2}U\1a](U\3catq\0h\0h\0es.", "here") == {
        "a": [b"cat", b"cat", b"cat"]
    }


@pytest.mark.parametrize(
    "name",
    [
        "os\nsystem",
        "numpy.core.multiarray\nfromfile",
        "numpy\nndarray.__class__.mro",
    ],
)
def test_the_refused_name_is_in_the_message_also_one_below_an_allowed_name(name):
    dotted = name.replace("\n", ".").replace(".", r"\.")
    with pytest.raises(SourceError, match=rf"here: the pickle holds the name {dotted}"):
        safe_pickle.loads(dict_of(b"U\x01a", b"c" + name.encode() + b"\n"), "here")


@pytest.mark.parametrize("name", [b"numpy\ndtype", b"numpy.core.multiarray\n_reconstruct"])
@pytest.mark.parametrize("state", [b"}U\x05stateNs", b"N}X\x05\0\0\0stateNs\x86"])
def test_an_allowed_name_can_not_be_changed_by_a_pickle(name, state):
    with pytest.raises(SourceError, match="a state for a type"):
        safe_pickle.loads(dict_of(b"U\x01a", b"c" + name + b"\n" + state + b"b"), "here")
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert np.array_equal(safe_pickle.loads(pickle_of({"data": array}), "here")["data"], array)


@pytest.mark.parametrize(
    "opcode",
    [
        b"\x82\x01",
        b"Pid\n",
        b"(ios\nsystem\n",
        b"I" + 10_000 * b"9" + b"\n",
        b"\x96" + b"\xff" * 7 + b"\x0f",
    ],
)
def test_instructions_that_plain_data_never_needs_are_refused(opcode):
    with pytest.raises(SourceError):
        safe_pickle.loads(b"\x80\x02" + opcode + b".", "here")


@pytest.mark.parametrize("size", [0, 10, 100, -1])
def test_a_cut_pickle_is_an_error_that_says_so(size):
    data = pickle_of({"data": np.zeros((2, 3), np.uint8), "labels": [1, 2], "more": "x" * 300})
    with pytest.raises(SourceError, match="here: not a whole pickle"):
        safe_pickle.loads(data[:size], "here")


@given(st.integers(0, 400), st.integers(0, 255))
def test_any_changed_byte_gives_a_value_or_a_source_error(position, byte):
    data = bytearray(
        pickle_of({"data": np.zeros((2, 3), np.uint8), "labels": [1, 2], "names": ["a", "b"]})
    )
    data[position % len(data)] = byte
    with contextlib.suppress(SourceError):
        safe_pickle.loads(bytes(data), "here")


# --- pickles that would end or hold up the process: none may be hashed, called or printed


def doubled(times: int) -> bytes:
    """`x = (x, x)`, again and again, by references."""
    return b")" + b"".join(b"q%ch%c\x86" % (number, number) for number in range(times))


NESTED_TUPLES = b")" + 120_000 * b"\x85"
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\1b\x87R"
DTYPE = b"cnumpy\ndtype\nU\2u1K\0K\1\x87R"
LONG = b"\x8a\xfa" + 249 * b"\xff" + b"\x7f"
LONG_TEXT = b"T\1\4\0\0" + 1025 * b"a"
UNNEEDED, LATIN1 = "an instruction that no batch needs", b"U\6latin1\x86R"
ATTACKS = {
    "a key of nested tuples": (dict_of(NESTED_TUPLES, b"N"), "a key of type tuple"),
    "a key that doubles": (dict_of(doubled(60), b"N"), "a key of type tuple"),
    "no key": (dict_of(b"N", b"N"), "a key of type NoneType"),
    "a long key": (dict_of(LONG_TEXT, b"N"), "a key of type bytes, expected a short text"),
    "a list that doubles": (dict_of(b"U\1a", b"]q\1(h\1h\1e"), "a value of type list"),
    "nested lists": (b"\x80\2" + 120_000 * b"]" + 119_999 * b"a" + b".", "a pickled list"),
    "nested states": (b"\x80\2" + 120_000 * DTYPE + 119_999 * b"\x85b" + b".", "a pickled _Made"),
    "a long text": (dict_of(b"U\1a", LONG_TEXT), "a value of type bytes, or a long text"),
    "a long text that is encoded again and again": (
        dict_of(
            b"U\1a",
            b"(X\1\4\0\0" + 1025 * b"a" + b"q\0" + 60 * (b"c_codecs\nencode\nh\0" + LATIN1) + b"l",
        ),
        "or more than the file has",
    ),
    "a large number": (b"\x80\2" + LONG + b".", UNNEEDED),
    "bytes that are not there": (b"\x80\5\x96" + struct.pack("<Q", 2**40) + b".", UNNEEDED),
    "a huge memo number": (b"\x80\2]r" + struct.pack("<I", 2**31 - 1) + b".", "a pickled list"),
    "a function that is changed": (
        dict_of(b"U\1a", b"c_codecs\nencode\n}b"),
        "a state for a method",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_no_batch_holds_is_refused(name):
    data, message = ATTACKS[name]
    with pytest.raises(SourceError, match=f"here: .*{message}"):
        safe_pickle.loads(data, "here")


def test_a_file_that_is_larger_than_any_batch_is_refused_unread(monkeypatch):
    monkeypatch.setattr(safe_pickle, "MAX_BYTES", 100)
    with pytest.raises(SourceError, match="here: the pickle holds 101 bytes, at most 100"):
        safe_pickle.loads(bytes(101), "here")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            ARRAY + b"(K\1(" + 100_000 * b"K\2" + b"t" + DTYPE + b"\x89U\1at" + b"b",
            "an array that is not",
        ),
        (ARRAY, "an array that is not .rows, values. of unsigned bytes"),
        (
            ARRAY + b"(K\1K\1\x85cnumpy\ndtype\nU\2f8K\0K\1\x87R\x89U\1xtb",
            "an array that is not",
        ),
        (b"(" + 3 * b"N" + b"t", "a value of type tuple"),
        (b"c_codecs\nencode\n]U\1a\x86R", "not a whole pickle"),
    ],
)
def test_a_value_that_no_batch_holds_is_refused(value, message):
    with pytest.raises(SourceError, match=message):
        safe_pickle.loads(dict_of(b"U\1a", value), "here")


PIECES = [
    *(
        b"(",
        b")",
        b"]",
        b"}",
        b"0",
        b"N",
        b"K\1",
        b"M\0\4",
        b"U\1a",
        b"X\1\0\0\0b",
        b"C\1c",
        b"a",
        b"e",
        b"l",
        b"d",
    ),
    *(
        b"s",
        b"u",
        b"t",
        b"\x85",
        b"\x86",
        b"\x87",
        b"R",
        b"b",
        b"q\0",
        b"q\1",
        b"h\0",
        b"h\1",
        b"\x94",
        b"\x93",
    ),
    *(
        ARRAY,
        DTYPE,
        LONG,
        b"c_codecs\nencode\n",
        b"X\6\0\0\0latin1",
        b"cnumpy\nndarray\n",
        b"cos\nsystem\n",
    ),
    *(
        b"T\1\4\0\0" + 1025 * b"a",
        b"(K\1K\1\x85" + DTYPE + b"\x89U\1xtb",
        b"I01\n",
        b"J\xff\xff\xff\xff",
        b"L1L\n",
    ),
]


@given(st.lists(st.sampled_from(PIECES), max_size=30))
def test_any_order_of_instructions_gives_bounded_values_or_a_source_error(pieces):
    with contextlib.suppress(SourceError):
        value = safe_pickle.loads(b"\x80\2}U\1k" + b"".join(pieces) + b"s.", "here")
        assert len(repr(value)) < 100_000
