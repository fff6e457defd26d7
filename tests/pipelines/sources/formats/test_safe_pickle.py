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

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31 - 1) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=4),
)


def dict_of(key: bytes, value: bytes) -> bytes:
    """A pickled dict of one entry, from the opcodes of its key and value."""
    return b"\x80\x02}" + key + value + b"s."


@settings(max_examples=30)
@given(st.dictionaries(st.text("abc", max_size=3), values, max_size=4))
def test_plain_values_of_python_2_come_back_as_the_standard_unpickler_reads_them(value):
    data = pickle_of(value)
    assert safe_pickle.loads(data, "here") == pickle.loads(data, encoding="bytes")


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_pickle_that_was_written_again_by_python_3_is_read_too(protocol):
    array = np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(4, 3))
    value = safe_pickle.loads(
        pickle.dumps({b"data": array, "labels": [1, 2], b"x": b"\xff"}, protocol), "here"
    )
    assert np.array_equal(value.pop(b"data"), array)
    assert value == {"labels": [1, 2], b"x": b"\xff"}
    assert safe_pickle.loads(b"\x80\2}U\1a](U\3catq\0h\0h\0es.", "here") == {
        b"a": [b"cat", b"cat", b"cat"]
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
@pytest.mark.parametrize("state", [b"}U\x05_callNs", b"N}X\x05\0\0\0_callNs\x86"])
def test_an_allowed_name_can_not_be_changed_by_a_pickle(name, state):
    with pytest.raises(SourceError, match="an array without its content"):
        safe_pickle.loads(dict_of(b"U\x01a", b"c" + name + b"\n" + state + b"b"), "here")
    array = np.arange(6, dtype=np.uint8)
    assert np.array_equal(safe_pickle.loads(pickle_of({"data": array}), "here")[b"data"], array)


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


def doubled(first: bytes, times: int, of_two: bytes) -> bytes:
    """`x = (x, x)`, again and again, by references."""
    steps = [first + b"q\0"]
    steps += [
        b"h%c" % number + b"h%c" % number + of_two + b"q%c" % (number + 1)
        for number in range(times)
    ]
    return b"".join(steps)


NESTED_TUPLES = b")" + 120_000 * b"\x85"
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\1b\x87R"
DTYPE = b"cnumpy\ndtype\nU\2u1K\0K\1\x87R"
LONG = b"\x8a\xfa" + 249 * b"\xff" + b"\x7f"
LONG_TEXT = b"T\1\4\0\0" + 1025 * b"a"
DEEP, SHARED = "more than 100 containers", "a value twice that is not a short text"
ATTACKS = {
    "a key of nested tuples": (dict_of(NESTED_TUPLES, b"N"), DEEP),
    "a key that doubles": (dict_of(doubled(b")", 60, b"\x86"), b"N"), SHARED),
    "a tuple as a key": (dict_of(b"K\1\x85", b"N"), "a key of type tuple"),
    "a list that doubles": (b"\x80\2]q\0" + b"]q\1(h\0h\0e.", SHARED),
    "nested lists": (b"\x80\2" + 120_000 * b"]" + 119_999 * b"a" + b".", DEEP),
    "nested states": (b"\x80\2" + 50 * DTYPE + 49 * b"\x85b" + b".", DEEP),
    "no key": (dict_of(b"N", b"N"), "a key of type NoneType"),
    "a long key": (dict_of(LONG_TEXT, b"N"), "a text of more than 1024 letters"),
    "a long text": (dict_of(b"U\1a", LONG_TEXT), "a text of more than 1024 letters"),
    "a long text that is encoded again and again": (
        dict_of(
            b"U\1a", b"(" + LONG_TEXT + b"q\0" + 50 * b"c_codecs\nencode\nh\0U\6latin1\x86R" + b"l"
        ),
        SHARED,
    ),
    "a large number": (b"\x80\2" + LONG + b".", "the instruction LONG1"),
    "a huge memo number": (
        b"\x80\x02]r" + struct.pack("<I", 2**31 - 1) + b".",
        "a memo number of 2147483647",
    ),
    "many instructions": (200_000 * b"\x80\2" + b"N.", "more than 200000 instructions"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_no_batch_holds_is_refused(monkeypatch, name):
    monkeypatch.setattr(safe_pickle, "MAX_INSTRUCTIONS", 200_000)
    data, message = ATTACKS[name]
    with pytest.raises(SourceError, match=f"here: the pickle holds .*{message}"):
        safe_pickle.loads(data, "here")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            ARRAY + b"(K\1(" + 100_000 * b"K\2" + b"t" + DTYPE + b"\x89U\1at" + b"b",
            "1 bytes for an array of shape",
        ),
        (ARRAY, "an array without its content"),
        (
            ARRAY + b"(K\1K\1\x85cnumpy\ndtype\nU\2f8K\0K\1\x87R\x89U\1xtb",
            "an array of another type than unsigned bytes",
        ),
        (b"(" + 3 * b"N" + b"t", "a value of type tuple"),
        (b"c_codecs\nencode\n]U\1a\x86R", "not a whole pickle"),
    ],
)
def test_a_value_that_no_batch_holds_is_refused(value, message):
    with pytest.raises(SourceError, match=message):
        safe_pickle.loads(dict_of(b"U\1a", value), "here")


@pytest.mark.parametrize("sizes", [(2, 6), (3, 4), (2**40, 0)])
def test_frames_have_no_effect_even_if_they_end_inside_an_instruction(sizes):
    """The standard unpickler drops the rest of such an instruction, so it would run others than
    those checked.
    """
    first, second = (b"\x95" + struct.pack("<Q", size) for size in sizes)
    assert safe_pickle.loads(b"\x80\4" + first + b"}" + second + b"C\1aNs.", "here") == {b"a": None}


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
        assert all(isinstance(key, str | bytes) for key in value)
        assert len(repr(value)) < 100_000
