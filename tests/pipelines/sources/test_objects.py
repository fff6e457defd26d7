"""What a path says: as Python's own function cuts it, and which names are text."""

import os
import posixpath

from hypothesis import example, given
from hypothesis import strategies as st

from pipelines.sources import objects

PATHS = st.text("ab./\\é", max_size=12)


@given(PATHS)
@example("a/.b")
@example("..a")
@example("a.b/c")
def test_a_path_is_cut_where_python_cuts_it(path):
    stem, last = posixpath.splitext(path)
    assert objects.split_extension(path) == (stem, last.removeprefix("."))


@given(st.binary(max_size=9))
def test_a_name_is_text_if_its_bytes_are(name):
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        is_text = False
    else:
        is_text = True
    assert objects.is_text(os.fsdecode(name)) == is_text
