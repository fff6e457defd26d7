"""The frame of the pages of both programs: one self-contained, accessible HTML file.

A page has no script and no external resource, and its content security policy makes browsers
enforce that. Templates escape every value, because keys, class names and error messages come from
raw input.
"""

import base64
import io
import json
import os
import unicodedata
from functools import partial
from typing import Any, NamedTuple

import jinja2
from PIL import Image

from shardset.errors import ConfigError, NotFound
from shardset.format import naming
from shardset.program import count
from shardset.storage.base import Storage
from shardset.storage.open import open_file
from shardset.version import __version__

MAX_LETTERS = 120
LOSSLESS_PIXELS = 1024
SHARP_SIDE = 48

_TOOL = f"shardset {__version__}"
_MARK = b'<meta name="generator" content="shardset '
_MARKED_BYTES = 1024
"""The generator tag precedes the title, within this many bytes."""


class Picture(NamedTuple):
    """An embedded image; a `sharp` one is so small that it is enlarged without smoothing."""

    uri: str
    sharp: bool


def render(package: str, template: str, **values: Any) -> bytes:
    """The page as UTF-8.

    `template` is a file of `package` that extends `page.html`; it gets `values`.
    """
    text = template_of(package, template).render(tool=_TOOL, **values)
    return text.encode("utf-8", "replace")


def template_of(package: str, name: str) -> jinja2.Template:
    """A template that is a file of `package`."""
    folders = jinja2.PackageLoader("shardset.html"), jinja2.PackageLoader(package, "")
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(folders),
        autoescape=jinja2.select_autoescape(),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    yaml = partial(json.dumps, ensure_ascii=False)  # JSON is YAML
    environment.filters |= {"clip": clip, "count": count, "yaml": yaml}
    return environment.get_template(name)


def output_of(storage: Storage, output: str | None) -> tuple[Storage, str]:
    """The folder and name of a page: the file `output`, or `report.html` in `storage`.

    Raises ConfigError if the page would replace anything but a page or an empty file.
    """
    target, name = (storage, naming.REPORT) if output is None else open_file(output)
    try:
        num_bytes = target.stat(name).num_bytes
        is_ours = not num_bytes or _MARK in target.read(name, 0, min(_MARKED_BYTES, num_bytes))
    except NotFound:
        # a folder or a device
        is_ours = target.is_remote or not os.path.exists(f"{target.url}/{name}")
    if is_ours:
        return target, name
    raise ConfigError(
        f"{target.url}/{name}: not a page of shardset; choose another --output, or remove it first"
    )


def picture(image: Image.Image) -> Picture:
    """A small image as the page embeds it: a WebP, lossless if it is tiny."""
    buffer = io.BytesIO()
    image.save(
        buffer, "WEBP", lossless=image.width * image.height <= LOSSLESS_PIXELS, quality=70, method=4
    )
    content = base64.b64encode(buffer.getvalue()).decode("ascii")
    return Picture(f"data:image/webp;base64,{content}", max(image.size) < SHARP_SIDE)


def clip(text: object, letters: int = MAX_LETTERS) -> str:
    """At most that many letters of a text, with control characters, which HTML can't hold,
    replaced.
    """
    plain = "".join(map(_shown, str(text)[:letters]))
    return plain if len(str(text)) <= letters else plain[:-1] + "…"


def _shown(letter: str) -> str:
    is_control = unicodedata.category(letter).startswith("C")
    return "\N{REPLACEMENT CHARACTER}" if is_control else letter
