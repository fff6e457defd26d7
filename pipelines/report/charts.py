"""The plots of the page: classes, shards, and sizes of images."""

from collections.abc import Mapping, Sequence

import numpy as np

from pipelines.report.collect import ReportData
from shardset.format.manifest import Manifest
from shardset.html import plots
from shardset.html.page import clip
from shardset.html.plots import Plot

MAX_CLASS_BARS = 40
MAX_SHARD_BARS = 40


def class_plot(manifest: Manifest) -> Plot:
    """Samples of each class: a bar for each of a few classes, a curve of many."""
    counts = {name: split.class_totals for name, split in manifest.splits.items()}
    if len(manifest.classes) <= MAX_CLASS_BARS:
        labels = [clip(info.name, 60) for info in manifest.classes]
        return plots.rows("Samples of each class", labels, counts, x_label="samples")
    ranked = {name: [*enumerate(sorted(numbers, reverse=True), 1)] for name, numbers in counts.items()}
    return plots.curves("Samples of each class, largest first", ranked, x_label="classes by their number of samples")


def shard_plots(manifest: Manifest) -> list[Plot]:
    """Samples and bytes of the shards: a bar for each of a few shards, histograms of many."""
    samples = {name: split.shard_sizes for name, split in manifest.splits.items()}
    sizes = {name: split.tar_bytes for name, split in manifest.splits.items()}
    if sum(map(len, samples.values())) > MAX_SHARD_BARS:
        return [
            _histogram("Shards by their samples", samples, "samples"),
            _histogram("Shards by their size", sizes, "bytes"),
        ]
    labels = [f"{name} {number}" for name, split in manifest.splits.items() for number in range(split.num_shards)]
    return [
        plots.rows("Samples in each shard", labels, _one_below_the_other(samples), x_label="samples"),
        plots.rows("Size of each shard", labels, _one_below_the_other(sizes), x_label="bytes"),
    ]


def _one_below_the_other(values: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """The series for rows that each belong to one of them: zeros in the rows of the others."""
    return {
        name: [value if name == other else 0 for other, others in values.items() for value in others] for name in values
    }


def image_plots(data: ReportData) -> list[Plot]:
    """Stored bytes of all images; sides and aspects of the decoded images if they differ."""
    catalog = data.catalog
    stored, images = {}, {}
    for number, name in enumerate(catalog.splits):
        stored[name] = catalog.image_bytes[(catalog.split == number) & (catalog.image_bytes > 0)].tolist()
        images[name] = [image for sample, image in data.images.items() if catalog.split[sample] == number]
    stored, images = ({name: some for name, some in each.items() if some} for each in (stored, images))
    charts = [_histogram("Stored bytes of an image", stored, "bytes")] if stored else []
    if len({(image.width, image.height) for each in images.values() for image in each}) > 1:
        shorter = {name: [min(image.width, image.height) for image in each] for name, each in images.items()}
        aspect = {
            name: [min(4.0, max(0.25, image.width / image.height)) for image in each] for name, each in images.items()
        }
        charts.append(_histogram("Shorter side", shorter, "pixels"))
        charts.append(_histogram("Aspect (width over height, 0.25 to 4)", aspect, "width / height"))
    return charts


def _histogram(title: str, values: Mapping[str, Sequence[float]], x_label: str) -> Plot:
    edges = plots.spread([value for series in values.values() for value in series])
    if edges[0] == edges[-1]:  # all values are equal; a histogram needs an interval
        edges = [edges[0] - 0.5, edges[0] + 0.5]
    counts = {name: np.histogram(series, edges)[0].tolist() for name, series in values.items()}
    return plots.histogram(title, edges, counts, x_label=x_label)
