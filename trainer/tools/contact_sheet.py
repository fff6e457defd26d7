"""A contact sheet: a page with a picture and a caption for each sample of a step."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from shardset.decode.image import decode
from shardset.errors import ConfigError, DamagedShard, UndecodableImage
from shardset.format.background import WHITE, Background
from shardset.format.manifest import LoadedSet
from shardset.html import page
from shardset.html.page import Picture
from shardset.stream.samples import Sample, SampleSet
from shardset.stream.timetable import StepVisit, Timetable

SIZE = 112
THREADS = 16


def check_name(path: str) -> None:
    """Raises ConfigError unless the name is that of a page."""
    if not path.endswith(".html"):
        raise ConfigError(f"--thumbnails {path}: the name must end with .html")


def render(timetable: Timetable, visits: Sequence[StepVisit], *, title: str, background: Background = WHITE) -> bytes:
    """The contact sheet of some samples of a timetable, as a page. Reads several samples at a time."""
    loaded = LoadedSet(timetable.manifest, timetable.storage)
    with SampleSet(loaded, timetable.split_name) as samples, ThreadPoolExecutor(THREADS) as threads:
        pictures = list(threads.map(lambda visit: _picture_of(samples, visit.sample.id, background), visits))
    num_pads = sum(visit.pad for visit in visits)
    return page.render(
        "trainer.tools",
        "contact_sheet.html",
        title=title,
        subtitle=f"{len(visits)} slots, {num_pads} of them pads of weight 0",
        sections=[],
        closing="",
        samples=[
            (picture, visit.sample.name or visit.sample.key, _caption(visit))
            for picture, visit in zip(pictures, visits, strict=True)
        ],
    )


def _picture_of(samples: SampleSet, number: int, background: Background) -> Picture | None:
    """None for a sample that is damaged or has no image that can be decoded."""
    try:
        sample: Sample = samples[number]
        return page.picture(_thumbnail_of(sample.bytes, background))
    except (DamagedShard, UndecodableImage):
        return None


def _thumbnail_of(image: bytes, background: Background) -> Image.Image:
    small = Image.fromarray(decode(image, (SIZE, SIZE), background=background))
    small.thumbnail((SIZE, SIZE))
    return small


def _caption(visit: StepVisit) -> list[str]:
    """The key; the label with its class, and whether the sample is a pad."""
    label = f"{visit.sample.label} {visit.sample.class_name}".strip()
    return [visit.sample.key, f"{label} (pad)" if visit.pad else label]
