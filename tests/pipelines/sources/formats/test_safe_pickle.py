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


def value_of(opcodes: bytes) -> bytes:
    """A pickled dict of one value under a fit key."""
    return dict_of(b"U\1a", opcodes)


@settings(max_examples=30)
@given(st.dictionaries(st.text("abc", max_size=3), plain | st.lists(plain), max_size=4))
def test_plain_values_of_python_2_come_back_as_the_standard_unpickler_reads_them(value):
    assert safe_pickle.loads(pickle_of(value), "here") == value


@pytest.mark.parametrize("protocol", [3, 4])
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


BATCH = pickle_of({"data": np.zeros((2, 3), np.uint8), "labels": [1, 2, 70_000], "x": "x" * 300})


def test_a_pickle_that_is_cut_anywhere_is_a_source_error():
    for size in range(len(BATCH)):
        with pytest.raises(SourceError, match=r"^here: "):
            safe_pickle.loads(BATCH[:size], "here")


@given(st.integers(0, 800), st.integers(0, 255), st.integers(0, 800))
def test_any_changed_byte_gives_a_value_or_a_source_error(position, byte, size):
    data = bytearray(BATCH)
    data[position % len(data)] = byte
    with contextlib.suppress(SourceError):
        safe_pickle.loads(bytes(data[:size]), "here")


# --- Pickles of what ended or held up the process: values nested 120,000 deep, tuples doubled 60
# times and then hashed, a memo of 2**31 entries, a shape of 100,000 numbers. Small ones stand for
# them: they are refused before they are hashed, called or printed.


def doubled(times: int) -> bytes:
    """`x = (x, x)`, again and again, by references."""
    return b")" + b"".join(b"q%ch%c\x86" % (number, number) for number in range(times))


NESTED_TUPLES = b")" + 3 * b"\x85"
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\1b\x87R"
DTYPE = b"cnumpy\ndtype\nU\2u1K\0K\1\x87R"
LONG = b"\x8a\xfa" + 249 * b"\xff" + b"\x7f"
LONG_TEXT = b"T\1\4\0\0" + 1025 * b"a"
UNNEEDED, NO_ARRAY = "an instruction that no batch needs", "an array that is not .rows, values. of"
BROKEN = "not a whole pickle"
STATE = b"}U\5stateNs"
FOREIGN = {
    "a name": (value_of(b"cos\nctermid\n"), r"the name os\.ctermid"),
    "a name of numpy": (
        value_of(b"cnumpy.core.multiarray\nfromfile\n"),
        r"the name numpy\.core\.multiarray\.fromfile",
    ),
    "a name below an allowed one": (
        value_of(b"cnumpy\nndarray.__class__.mro\n"),
        r"the name numpy\.ndarray\.__class__\.mro",
    ),
    "a state for a class": (value_of(b"cnumpy\ndtype\n" + STATE + b"b"), BROKEN),
    "slots for a class": (
        value_of(b"cnumpy.core.multiarray\n_reconstruct\nN" + STATE + b"\x86b"),
        BROKEN,
    ),
    "an extension": (b"\x80\2\x82\1.", UNNEEDED),
    "a persistent object": (b"\x80\2Pid\n.", UNNEEDED),
    "an instance": (b"\x80\2(ios\nctermid\n.", UNNEEDED),
    "a long text of digits": (b"\x80\2I" + 100 * b"9" + b"\n.", UNNEEDED),
    "a key of nested tuples": (dict_of(NESTED_TUPLES, b"N"), BROKEN),
    "a key that doubles": (dict_of(doubled(21), b"N"), UNNEEDED),
    "no key": (dict_of(b"N", b"N"), BROKEN),
    "a list that doubles": (value_of(b"]q\1(h\1h\1e"), "a value of type list"),
    "nested lists": (b"\x80\2" + 3 * b"]" + 2 * b"a" + b".", "a pickled list"),
    "nested states": (b"\x80\2" + 3 * DTYPE + 2 * b"\x85b" + b".", "a pickled _Made"),
    "a long text": (value_of(LONG_TEXT), "a value of type bytes, or a long text"),
    "a large number": (b"\x80\2" + LONG + b".", UNNEEDED),
    "bytes that are not there": (b"\x80\5\x96" + struct.pack("<Q", 9) + b".", BROKEN),
    "a large memo number": (b"\x80\2]r" + struct.pack("<I", 999) + b".", UNNEEDED),
    "a function of the standard library": (value_of(b"c_codecs\nencode\n}b"), "the name _codecs"),
    "a shape of many numbers": (
        value_of(ARRAY + b"(K\1(" + 3 * b"K\2" + b"t" + DTYPE + b"\x89U\1atb"),
        NO_ARRAY,
    ),
    "an array without a state": (value_of(ARRAY), NO_ARRAY),
    "an array of floats": (
        value_of(ARRAY + b"(K\1K\1\x85cnumpy\ndtype\nU\2f8K\0K\1\x87R\x89U\1xtb"),
        NO_ARRAY,
    ),
    "a tuple": (value_of(b"(NNNt"), "a value of type tuple"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_no_batch_holds_is_refused(name):
    data, message = FOREIGN[name]
    with pytest.raises(SourceError, match=f"here: .*{message}"):
        safe_pickle.loads(data, "here")


def test_a_file_that_is_larger_than_any_batch_is_refused_unread(monkeypatch):
    monkeypatch.setattr(safe_pickle, "MAX_BYTES", 100)
    with pytest.raises(SourceError, match="here: the pickle holds 101 bytes, at most 100"):
        safe_pickle.loads(bytes(101), "here")


PIECES = [
    *(bytes([opcode]) for opcode in b"()]}0Naeldsut\x85\x86\x87Rb\x94\x93"),
    *(number + bytes([at]) for number in (b"q", b"h") for at in (0, 1)),
    *(ARRAY, DTYPE, LONG, b"cnumpy\nndarray\n", b"cos\nctermid\n"),
    *(b"K\1", b"M\0\4", b"U\1a", b"X\1\0\0\0b", b"C\1c", LONG_TEXT),
    *(b"(K\1K\1\x85" + DTYPE + b"\x89U\1xtb", b"I01\n", b"J\xff\xff\xff\xff", b"L1L\n"),
]


@given(st.lists(st.sampled_from(PIECES), max_size=30))
def test_any_order_of_instructions_gives_bounded_values_or_a_source_error(pieces):
    with contextlib.suppress(SourceError):
        value = safe_pickle.loads(b"\x80\2}U\1k" + b"".join(pieces) + b"s.", "here")
        assert len(repr(value)) < 100_000
