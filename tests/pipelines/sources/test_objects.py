"""Which names are text."""

import os

from hypothesis import given
from hypothesis import strategies as st

from pipelines.sources import objects


@given(st.binary(max_size=9))
def test_a_name_is_text_if_its_bytes_are(name):
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        is_text = False
    else:
        is_text = True
    assert objects.is_text(os.fsdecode(name)) == is_text
