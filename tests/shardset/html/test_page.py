"""The frame of a page: escaped, without a script, without an address that leads elsewhere."""

import base64
import io
import re
import unicodedata

import jinja2
import numpy as np
import pytest
from PIL import Image

from shardset.html import page

FRAME = {
    "title": "t", "subtitle": "s", "sections": [("a", "A")], "closing": "c", "findings": [], "max_rows": 9,
    "tiles": [("samples", "7", "")], "plots": [], "epochs": [], "evaluations": [], "settings": [],
}  # fmt: skip


def rendered(**values: object) -> str:
    return page.render("trainer.tools", "report.html", **{**FRAME, **values}).decode()


def test_what_is_put_in_is_escaped_everywhere():
    evil = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"
    text = rendered(
        title=evil, subtitle=evil, settings=[(evil, evil)], tiles=[("a", evil, evil)],
        findings=[page.Finding(level="bad", text=evil, anchor="curves")],
    )  # fmt: skip
    assert "<script" not in text
    assert "<img" not in text
    assert text.count("&lt;script&gt;") >= 6


def test_a_page_refers_to_nothing_outside_itself():
    text = rendered()
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text)
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_a_value_that_a_template_needs_can_not_be_forgotten():
    with pytest.raises(jinja2.UndefinedError):
        page.render("trainer.tools", "report.html", title="only this")


def test_a_long_text_is_cut_and_control_characters_are_replaced():
    assert page.clip("a" * 200) == "a" * 119 + "…"
    assert page.clip("a\x00b\x1b[31m\u202e") == "a\ufffdb\ufffd[31m\ufffd"
    assert page.clip("exactly", 7) == "exactly"


@pytest.mark.parametrize("space", ["NO-BREAK SPACE", "NARROW NO-BREAK SPACE", "IDEOGRAPHIC SPACE", "EN SPACE"])
def test_every_space_stays_what_it_is(space):
    text = f"98.70{unicodedata.lookup(space)}%"
    assert page.clip(text) == text


def test_half_a_surrogate_is_no_failure():
    assert b"half" in page.render("trainer.tools", "report.html", **{**FRAME, "title": "half \ud800"})


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (2.5e6, "2.5 MB"), (7e12, "7.0 TB")]
)
def test_sizes_are_in_units_of_a_thousand(num_bytes, text):
    assert page.size(num_bytes) == text


def test_pictures_are_embedded_and_tiny_ones_are_lossless_and_not_blurred():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 96, 96, 3), dtype=np.uint8)
    tiny, large = page.picture(Image.fromarray(pixels[0, :8, :8])), page.picture(Image.fromarray(pixels[1]))
    assert (tiny.sharp, large.sharp) == (True, False)
    stored = base64.b64decode(tiny.uri.removeprefix("data:image/webp;base64,"))
    assert (np.asarray(Image.open(io.BytesIO(stored))) == pixels[0, :8, :8]).all()
