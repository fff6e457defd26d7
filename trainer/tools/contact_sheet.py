"""Contact sheets: a page or a picture with a thumbnail and a caption for each sample of a step."""

import html
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from PIL import Image, ImageDraw

from shardset.checksum import crc32c_of
from shardset.decode.image import decode
from shardset.errors import ConfigError, UndecodableImage
from shardset.format.background import WHITE, Background
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.index import index_fields
from shardset.format.manifest import Split
from shardset.html.page import data_uri
from shardset.read.index_rows import read_rows
from shardset.storage.base import Storage
from shardset.storage.checked import read_twice
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
class SheetImage:
    """A sample and its thumbnail; None if it has no image that can be decoded."""

    visit: StepVisit
    image: Image.Image | None

    @property
    def lines(self) -> tuple[str, str]:
        """The two lines of the caption: the key; the label with its class, and whether the sample is a pad."""
        sample = self.visit.sample
        label = f"{sample.label} {sample.class_name}".strip()
        return sample.key, f"{label} (pad)" if self.visit.pad else label


def check_name(path: str) -> None:
    """Raises ConfigError unless the name ends with a known format."""
    if not path.endswith(FORMATS):
        raise ConfigError(f"--thumbnails {path}: the name must end with {' or '.join(FORMATS)}")


def render(
    storage: Storage,
    split: Split,
    visits: Sequence[StepVisit],
    *,
    title: str,
    path: str,
    background: Background = WHITE,
) -> bytes:
    """The contact sheet in the format that `path` ends with. Reads several images at a time."""
    numbers = {shard.path: number for number, shard in enumerate(split.shards)}

    def thumbnail(visit: StepVisit) -> SheetImage:
        image = _image_of(storage, split, numbers[visit.sample.shard], visit.sample.position)
        return SheetImage(visit, _thumbnail_of(image, background))

    with ThreadPoolExecutor(THREADS) as threads:
        thumbnails = list(threads.map(thumbnail, visits))
    return _page(thumbnails, title) if path.endswith(".html") else _picture(thumbnails)


def _image_of(storage: Storage, split: Split, number: int, position: int) -> bytes | None:
    shard = split.shards[number]
    row = read_rows(storage, shard, split.fields, [position])[0]
    names = index_fields(row.reshape(1))
    # By offset, because the checksum covers the fields in the order of the tar. Offset 0 means absent.
    fields = sorted((*row[f".{name}"].tolist(), name) for name in names)
    byte_ranges = [(offset, size, name) for offset, size, name in fields if offset]
    contents = read_twice(
        lambda: _contents_of(storage, shard.path, byte_ranges),
        lambda contents: crc32c_of(*contents.values()) == row["crc32c"],
    )
    if crc32c_of(*contents.values()) != row["crc32c"]:
        return None
    return next((contents[name] for name in names if name in contents and name in FIELD_OF_EXTENSION), None)


def _contents_of(storage: Storage, path: str, byte_ranges: Sequence[tuple[int, int, str]]) -> dict[str, bytes]:
    """The fields of a sample, in the order of the tar."""
    if not byte_ranges:
        return {}
    start, stop = byte_ranges[0][0], max(offset + size for offset, size, _ in byte_ranges)
    data = storage.read(path, start, stop)
    return {name: data[offset - start : offset - start + size] for offset, size, name in byte_ranges}


def _thumbnail_of(data: bytes | None, background: Background) -> Image.Image | None:
    if data is None:
        return None
    try:
        small = Image.fromarray(decode(data, (SIZE, SIZE), background=background))
    except UndecodableImage:
        return None
    small.thumbnail((SIZE, SIZE))
    return small


def _page(thumbnails: Sequence[SheetImage], title: str) -> bytes:
    figures = "\n".join(_figure(thumbnail) for thumbnail in thumbnails)
    return _PAGE.format(title=html.escape(title), size=SIZE, figures=figures).encode()


def _figure(thumbnail: SheetImage) -> str:
    key, label = (html.escape(line) for line in thumbnail.lines)
    name = html.escape(thumbnail.visit.sample.name or "")
    kind = ' class="pad"' if thumbnail.visit.pad else ""
    img = '<img alt="no image">'
    if thumbnail.image is not None:
        img = f'<img alt="" src="{data_uri("image/png", _png(thumbnail.image))}">'
    return f'<figure{kind} title="{name}">{img}<figcaption>{key}<br>{label}</figcaption></figure>'


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _enlarged(image: Image.Image) -> Image.Image:
    """The image enlarged by a whole number, so that the pixels of tiny images stay sharp squares."""
    times = max(1, SIZE // max(image.size))
    return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)


def _picture(thumbnails: Sequence[SheetImage]) -> bytes:
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
    return _png(sheet)
