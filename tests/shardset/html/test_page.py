"""The frame of a page: escaped, without a script, without an address that leads elsewhere."""

import base64
import io
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

from shardset.html import page

NUMBERS = (
    "device epoch global_step samples loss top1 top5 seconds compilations busy_percent"
    " input_wait_percent reduced_global_rate rate_per_device"
)


def run_of(text: str, **values: object) -> SimpleNamespace:
    """A run whose model, set and address are called so."""
    config = SimpleNamespace(model=SimpleNamespace(name=text))
    empty: dict[str, Any] = {name: [] for name in ("steps", "epochs", "evaluations", "worst")}
    facts = {"final": None, "last_step": 7, "num_damaged": 0, "url": text, "started": ""}
    return SimpleNamespace(config=config, **{**empty, **facts, **values})


FRAME = {
    "addresses": ["a/b"],
    "smoothing": 0.9,
    "max_rows": 9,
    "plots": [],
    "run": run_of("t"),
    "changed": [],
    "settings": [],
    "advice": str,
}


def rendered(**values: object) -> str:
    return page.render("trainer.tools", "report.html", **{**FRAME, **values}).decode()


def test_what_is_put_in_is_escaped_everywhere():
    evil = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"
    record = SimpleNamespace(**dict.fromkeys(NUMBERS.split(), 0), split=evil)
    tables = {"evaluations": [record], "epochs": [record], "worst": [(None, evil, [evil])]}
    text = rendered(
        settings=[(evil, evil)], changed=[(evil, evil)],
        run=run_of(evil, **tables), advice=lambda percent: evil, addresses=[evil],
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


def test_a_long_text_is_cut_and_only_control_characters_are_replaced():
    assert page.clip("a" * 200) == "a" * 119 + "…"
    assert page.clip("a\x00b\x1b[31m\u202e") == "a\ufffdb\ufffd[31m\ufffd"
    assert page.clip("exactly", 7) == "exactly"
    spaces = "98.70\N{NO-BREAK SPACE}%\N{IDEOGRAPHIC SPACE}\N{EN SPACE}"
    assert page.clip(spaces) == spaces
    assert "half" in rendered(run=run_of("half \ud800"))  # of a surrogate


def test_pictures_are_embedded_and_tiny_ones_are_lossless_and_not_blurred():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 96, 96, 3), dtype=np.uint8)
    tiny, large = (
        page.picture(Image.fromarray(pixels[0, :8, :8])),
        page.picture(Image.fromarray(pixels[1])),
    )
    assert (tiny.sharp, large.sharp) == (True, False)
    stored = base64.b64decode(tiny.uri.removeprefix("data:image/webp;base64,"))
    assert (np.asarray(Image.open(io.BytesIO(stored))) == pixels[0, :8, :8]).all()
