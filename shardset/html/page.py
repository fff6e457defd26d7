"""The frame of the reports of both programs: one self-contained, accessible HTML page.

A page has no script and no external resource, and its content security policy makes browsers enforce that. Templates
escape every value, because keys, class names and error messages come from raw input.
"""

import base64
import os
import unicodedata
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2

from shardset.errors import ConfigError, NotFound
from shardset.program import count
from shardset.storage.base import Storage

MAX_LETTERS = 120

_MARK = b'<meta name="generator" content="shardset '
_MARKED_BYTES = 1024
"""The generator tag stands before the title, within this many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sentence of a summary. `level` is `good`, `note` or `bad`; `anchor` is the id of its section."""

    level: str
    text: str
    anchor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An embedded image with its size on the page; `sharp` ones are enlarged without smoothing."""

    uri: str
    width: int
    height: int
    sharp: bool


def render(package: str, template: str, **values: Any) -> bytes:
    """The page as UTF-8. `template` is a file of `package` that extends `page.html`; it gets `values`."""
    sources = {name: _text("shardset.html", f"templates/{name}") for name in ("page.html", "parts.html", "page.css")}
    environment = jinja2.Environment(
        loader=jinja2.DictLoader({**sources, template: _text(package, template)}),
        autoescape=lambda name: name is None or name.endswith(".html"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"clip": clip, "size": size, "count": count}
    return environment.get_template(template).render(**values).encode("utf-8", "replace")


def refuse_foreign(storage: Storage, name: str) -> None:
    """Raises ConfigError if a page would replace anything but a page or an empty file."""
    where = f"{storage.url}/{name}"
    try:
        stat = storage.stat(name)
    except NotFound:
        if storage.is_remote or not os.path.exists(where):
            return
    else:
        start = storage.read(name, 0, min(_MARKED_BYTES, stat.num_bytes), generation=stat.generation)
        if not start or _MARK in start:
            return
    raise ConfigError(f"{where}: not a page of shardset; choose another --output, or replace it with --force")


def data_uri(media_type: str, content: bytes) -> str:
    """A `data:` URL of the content."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"


def clip(text: object, letters: int = MAX_LETTERS) -> str:
    """At most that many letters of a text, with control characters, which HTML can't hold, replaced."""
    plain = "".join(map(_shown, str(text)[:letters]))
    return plain if len(str(text)) <= letters else plain[:-1] + "…"


def _shown(letter: str) -> str:
    # To Python every space but the plain one is unprintable, such as the no-break space and the ideographic space.
    is_shown = letter.isprintable() or unicodedata.category(letter) == "Zs"
    return letter if is_shown else "\N{REPLACEMENT CHARACTER}"


def size(num_bytes: float) -> str:
    """A size in decimal units: `12 bytes`, `3.4 kB`, `1.2 GB`."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} bytes"
    for unit, factor in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if num_bytes < 1000 * factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes / 1e12:,.1f} TB"


def _text(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
