"""A page or a picture of small images with a line under each: which samples were in a step."""

import base64
import html
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import google_crc32c
from PIL import Image, ImageDraw

from shardset.decode.image import decode
from shardset.errors import ConfigError, UndecodableImage
from shardset.format.background import WHITE, Background
from shardset.format.manifest import Split
from shardset.format.tar import index_fields
from shardset.read.indexes import read_rows
from shardset.storage.base import Storage
from shardset.storage.checked import read_twice
from shardset.stream.source import IMAGE_FIELDS
from shardset.stream.timetable import StepVisit

SIZE = 112
CAPTION = 26
COLUMNS = 10
THREADS = 16
FORMATS = (".html", ".png")

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 13px sans-serif; margin: 1.5em; }}
div {{ display: flex; flex-wrap: wrap; gap: 8px; }}
figure {{ margin: 0; width: {size}px; }}
figure.pad {{ opacity: 0.4; }}
img {{ width: {size}px; height: {size}px; object-fit: contain; background: #eee; image-rendering: pixelated; }}
figcaption {{ overflow-wrap: anywhere; }}
</style>
<h1>{title}</h1>
<div>
{figures}
</div>
</html>
"""


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A small picture and what is said under it; `image` is None where the sample has none that can be decoded."""

    seen: StepVisit
    image: Image.Image | None

    @property
    def lines(self) -> tuple[str, str]:
        """The key; the label and its class, and whether it is a pad."""
        sample = self.seen.sample
        label = f"{sample.label} {sample.class_name}".strip()
        return sample.key, f"{label} (pad)" if self.seen.pad else label


def check_name(path: str) -> None:
    """Raises ConfigError unless the name says one of the formats."""
    if not path.endswith(FORMATS):
        raise ConfigError(f"--thumbnails {path}: the name must end with {' or '.join(FORMATS)}")


def render(
    storage: Storage, split: Split, seen: Sequence[StepVisit], *, title: str, path: str, background: Background = WHITE
) -> bytes:
    """The sheet in the format that `path` ends with; reads the images, several at a time."""
    check_name(path)
    numbers = {shard.path: number for number, shard in enumerate(split.shards)}

    def thumbnail(one: StepVisit) -> Thumbnail:
        image = _image_of(storage, split, numbers[one.sample.shard], one.sample.position)
        return Thumbnail(one, _small(image, background))

    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(thumbnail, seen))
    return _page(found, title) if path.endswith(".html") else _picture(found)


def _image_of(storage: Storage, split: Split, number: int, position: int) -> bytes | None:
    shard = split.shards[number]
    row = read_rows(storage, shard, [position])[0]
    names = index_fields(row.reshape(1))
    found = sorted((*row[f".{name}"].tolist(), name) for name in names)
    places = [(offset, size, name) for offset, size, name in found if offset]
    contents = read_twice(
        lambda: _contents_of(storage, shard.path, places), lambda contents: _crc32c(contents) == row["crc32c"]
    )
    if _crc32c(contents) != row["crc32c"]:
        return None
    return next((contents[name] for name in names if name in contents and name in IMAGE_FIELDS), None)


def _contents_of(storage: Storage, path: str, places: Sequence[tuple[int, int, str]]) -> dict[str, bytes]:
    """The fields of a sample in member order."""
    if not places:
        return {}
    start, stop = places[0][0], max(offset + size for offset, size, _ in places)
    data = storage.read(path, start, stop)
    return {name: data[offset - start : offset - start + size] for offset, size, name in places}


def _crc32c(contents: dict[str, bytes]) -> int:
    crc = 0
    for content in contents.values():
        crc = google_crc32c.extend(crc, content)
    return crc


def _small(data: bytes | None, background: Background) -> Image.Image | None:
    if data is None:
        return None
    try:
        small = Image.fromarray(decode(data, (SIZE, SIZE), background=background))
    except UndecodableImage:
        return None
    small.thumbnail((SIZE, SIZE))
    return small


def _page(thumbnails: Sequence[Thumbnail], title: str) -> bytes:
    figures = "\n".join(_figure(thumbnail) for thumbnail in thumbnails)
    return _PAGE.format(title=html.escape(title), size=SIZE, figures=figures).encode()


def _figure(thumbnail: Thumbnail) -> str:
    key, label = (html.escape(line) for line in thumbnail.lines)
    name = html.escape(thumbnail.seen.sample.name or "")
    kind = ' class="pad"' if thumbnail.seen.pad else ""
    return f'<figure{kind} title="{name}">{_img(thumbnail.image)}<figcaption>{key}<br>{label}</figcaption></figure>'


def _img(image: Image.Image | None) -> str:
    if image is None:
        return '<img alt="no image">'
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode("ascii")}">'


def _enlarged(image: Image.Image) -> Image.Image:
    """Whole multiples: pixels of tiny images stay sharp squares."""
    times = max(1, SIZE // max(image.size))
    return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)


def _picture(thumbnails: Sequence[Thumbnail]) -> bytes:
    width, height = SIZE + 8, SIZE + CAPTION + 8
    columns = min(COLUMNS, len(thumbnails))
    sheet = Image.new("RGB", (columns * width, -(-len(thumbnails) // columns) * height), "white")
    draw = ImageDraw.Draw(sheet)
    for number, thumbnail in enumerate(thumbnails):
        row, column = divmod(number, columns)
        left, top = column * width + 4, row * height + 4
        if thumbnail.image is not None:
            sheet.paste(_enlarged(thumbnail.image), (left, top))
        for line, text in enumerate(thumbnail.lines):
            draw.text((left, top + SIZE + 12 * line), text[-18:] if line == 0 else text[:18], fill="black")
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()
