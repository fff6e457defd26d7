"""Writes a PCollection of samples as a shard set.

Each bundle stores its bytes in one file, and only rows go on. The samples are put in order by the
hashes of their keys, and then take the way of a build. So neither runner, nor workers, nor bundles
decide a byte.
"""

import json
import operator
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import GoogleCloudOptions
from apache_beam.pvalue import AsSingleton
from apache_beam.transforms.window import GlobalWindows
from apache_beam.typehints import with_input_types, with_output_types

from pipelines.begin import prepare_from
from pipelines.build_steps import count_unit
from pipelines.config import BuildConfig
from pipelines.holdout import REST
from pipelines.images.options import ImageOptions, options_of
from pipelines.pipeline import PlanShards, Step, count, publish
from pipelines.plan import paths, tables
from pipelines.plan.index import UnitSpool, examined, write_new_unit
from pipelines.plan.summaries import KnownCount
from pipelines.plan.tables import QuarantineEntry, SampleRow
from pipelines.sources import refuse_foreign_options
from pipelines.sources.base import Extent, RawSample, Rejected, Spool, Survey, Unit, class_infos
from pipelines.sources.objects import UNKNOWN_FIELD
from pipelines.write.replace import newest_of
from shardset.errors import ChangedInput, ConfigError, SourceError, UndecodableImage
from shardset.format.images import format_of
from shardset.format.labels import NO_LABEL
from shardset.order.permutation import hash_text
from shardset.raw import Raw
from shardset.settings import parsed, settings_of, value_text
from shardset.storage.base import Storage
from shardset.storage.open import open_storage

ROWS_PER_UNIT = 10_000

Spooled = tuple[int, str, Any]
"""63 bits of the hash of a key, the key, and its row, its quarantine entry, or the KnownCount of a
sample that an append skips.
"""


class WriteShards(beam.PTransform[beam.PCollection[Any], beam.PCollection[str]]):
    """Writes a bounded PCollection as a shard set, as `shardset build` does; the one element of its
    result is the digest of the manifest.

    An element is a `shardset.Raw`; or, with `columns`, a dict, a NamedTuple or a Beam Row. Then
    `columns` names the column of the `key`, of the `image` and, if there are any, of the `label`,
    of the `split`, and of further fields by their extensions: `{"key": "id", "image":
    "picture.bytes", "txt": "caption"}`. A dot leads into a nested record.

    Args:
        output: The folder of the set: local, gs://, s3:// or az://, the same for all workers.
        split_of: Maps an element to its split; without it and a column, all are in `train`.
        columns: See above.
        classes: The names of the classes, by label. Without it labels are numbers.
        append: Adds to the set at `output`: True or "skip" leaves out samples whose keys it has,
            "store" stores them again.
        options: Options of `shardset build`, with underscores: `samples_per_shard=1000`, `seed`,
            `holdout={"test": 0.1}`, `verify`, `resize_shorter`, `overwrite`.

    A pipeline that failed resumes if it has the same elements, and `--job_name` if there is one.
    Raises ConfigError where it is applied. A sample that can't be read is put into quarantine; two
    with one key, or a key, label or field of a wrong type, fail the pipeline with SourceError.
    """

    def __init__(
        self,
        output: str,
        *,
        split_of: Callable[[Any], str] | None = None,
        columns: Mapping[str, str] | None = None,
        classes: Sequence[str] | None = None,
        append: bool | str = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if split_of and (columns or {}).get("split"):
            raise ConfigError("split_of and the column of the split say the same; give one of them")
        self._of_element = RawSamples(dict(columns or {}), split_of, tuple(classes or ()))
        given = {name: value_text(value) for name, value in options.items()}
        images = {name: given.pop(name) for name in settings_of(ImageOptions) if name in given}
        image = ImageOptions(**parsed(ImageOptions, images))
        if append:
            given["append"] = "skip" if append is True else str(append)
            image = options_of(newest_of(output)[0])
        self._config = BuildConfig(
            source="beam",
            input="the samples of WriteShards",
            output=output,
            image=image,
            **parsed(BuildConfig, given),
        )
        refuse_foreign_options(self._config)

    def expand(self, samples: beam.PCollection[Any]) -> beam.PCollection[str]:
        """Prepares the output, and adds the steps."""
        if not samples.is_bounded:
            raise ConfigError(f"{samples}: is unbounded; a set needs an end")
        config, classes = self._config, self._of_element.classes
        output = open_storage(config.output)
        job = samples.pipeline.options.view_as(GoogleCloudOptions).job_name or ""
        source = Collected(output, job, classes)
        build = prepare_from(source, config, output).build
        spooled = (
            samples
            | "Leave the windows" >> beam.WindowInto(GlobalWindows())
            | "Take the parts of each element" >> beam.Map(self._of_element.raw_sample)
            | "Examine and spool each image" >> beam.ParDo(SpoolImages(build))
        )
        num_units = AsSingleton(
            spooled
            | "Count the samples" >> beam.combiners.Count.Globally()
            | "Count the units" >> beam.Map(_units_for)
        )
        by_unit = spooled | "Choose the unit of each sample" >> beam.Map(_with_unit, num_units)
        all_units = (
            samples.pipeline
            | "Begin" >> beam.Create([None])
            | "List all units" >> beam.FlatMap(_empty_units, num_units)
        )
        units = (
            (by_unit, all_units)
            | "Add units without samples" >> beam.Flatten()
            | "Bring the samples of each unit together" >> beam.GroupByKey()
            | "Write each unit" >> beam.ParDo(WriteUnit(build))
        )
        return publish(build, units | "Plan the shards" >> PlanShards(build, num_units))


@dataclass(frozen=True, slots=True)
class Collected:
    """The samples that a pipeline spools at the output; as a source without units."""

    input: Storage
    job: str
    classes: Sequence[str]

    def survey(self) -> Survey:
        """Only the name of the job tells one input from another."""
        classes = class_infos(self.classes) if self.classes else None
        return Survey(units=[{"job": self.job}], classes=classes, splits=[])

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """Elements have no units before they are spooled."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class RawSamples:
    """Makes the RawSample of an element: by `columns` unless it is a Raw, see WriteShards."""

    columns: Mapping[str, str]
    split_of: Callable[[Any], str] | None
    classes: Sequence[str]

    def raw_sample(self, element: Any) -> RawSample:
        """Raises SourceError for a key, an image, a label or a field of a wrong type."""
        raw, split = self._raw(element)
        if self.split_of:
            split = self.split_of(element)
        if not raw.key or not (isinstance(raw.key, str) and isinstance(split, str)):
            raise SourceError(
                f"a sample has the key {raw.key!r} and the split {split!r}, expected texts; see"
                " shardset.Raw"
            )
        if not isinstance(raw.image, bytes | None):
            raise SourceError(
                f"{raw.key}: its image is of type {type(raw.image).__name__}, expected the bytes of"
                " an encoded image"
            )
        image = "" if raw.image is None else _field_of(raw.image)
        fields: dict[str, Extent | bytes] = {} if raw.image is None else {image: raw.image}
        for name, value in raw.fields.items():
            if value is not None:
                fields[name] = _content(value, f"{raw.key}: field {name}")
        return RawSample(
            name=raw.key,
            key=raw.key,
            split=split,
            label=self._label(raw),
            image=image,
            fields=fields,
        )

    def _raw(self, element: Any) -> tuple[Raw, str]:
        if isinstance(element, Raw):
            return element, REST
        if not self.columns:
            raise SourceError(
                f"an element is of type {type(element).__name__}, expected shardset.Raw, or columns"
                " of WriteShards that say where its key and its image are"
            )
        values = {name: _value(element, column) for name, column in self.columns.items()}
        known = {name: values.pop(name, None) for name in ("key", "image", "label")}
        split = values.pop("split", REST)
        return Raw(**known, fields=values), split

    def _label(self, raw: Raw) -> int:
        label: Any = raw.label  # also numbers of NumPy
        if label is None:
            return NO_LABEL
        if label in self.classes:
            return self.classes.index(label)
        try:
            return operator.index(label)
        except TypeError as error:
            raise SourceError(
                f"{raw.key}: its label is {label!r}, expected a number from 0, or one of the"
                " classes of WriteShards"
            ) from error


@with_input_types(RawSample)
@with_output_types(Spooled)
class SpoolImages(Step):
    """Examines samples, and stores their bytes in one file for each bundle."""

    def start_bundle(self) -> None:
        self._stack = ExitStack()
        path = paths.spool_path(uuid.uuid4().hex)
        self._spool = UnitSpool(self.build.files, path, self._stack)

    def work(self, sample: RawSample) -> Iterator[Spooled]:
        """Leaves the file unwritten where it, or a step that reads its results, fails."""
        skipped = KnownCount()
        try:
            rows: list[Any] = list(examined(self.build, [sample], self._spool, skipped))
            self._spool.recent.clear()
            for row in rows or [skipped]:
                yield hash_text(sample.key, key=0) >> 1, sample.key, row
        except BaseException:
            self._stack.__exit__(*sys.exc_info())
            raise

    def finish_bundle(self) -> None:
        self._stack.close()
        super().finish_bundle()


@with_output_types(int)
class WriteUnit(Step):
    """Writes the table and the summary of a unit, in the order of the hashes of its keys."""

    def work(self, unit: tuple[int, Iterable[Spooled | None]]) -> Iterable[int]:
        number, spooled = unit
        ordered = sorted(filter(None, spooled), key=operator.itemgetter(0, 1))
        for (_, key, _), (_, other, _) in pairwise(ordered):
            if key == other:
                raise SourceError(
                    f"several samples have the key {key!r}; give each its own, such as the path or"
                    " the id of its row"
                )
        rows, rejected, skipped = list[SampleRow](), list[QuarantineEntry](), KnownCount()
        for _, _, row in ordered:
            if isinstance(row, SampleRow):
                rows.append(row)
            elif isinstance(row, QuarantineEntry):
                rejected.append(row)
            else:
                skipped.add(row)
        if self.build.resumes:
            self._refuse_others(number, rows)
        count_unit(write_new_unit(self.build, number, rows, rejected, skipped), count)
        return [number]

    def _refuse_others(self, number: int, rows: Sequence[SampleRow]) -> None:
        """Raises ChangedInput if an earlier run of the job has had other samples."""
        content = self.build.files.find(paths.unit_path(number))
        if content is None:
            return
        old = tables.rows_of(tables.from_bytes(content, tables.UNIT))
        if list(map(_identity, old)) != list(map(_identity, rows)):
            raise ChangedInput(
                f"{self.build.config.output}: a job of the same name began it with other samples;"
                " give this one another --job_name, and overwrite=True"
            )


def _identity(row: SampleRow) -> tuple[Any, ...]:
    contents = [part.crc32c if isinstance(part, Extent) else part for _, part in row.fields]
    return row.name, row.label, [field for field, _ in row.fields], contents


def _field_of(image: bytes) -> str:
    try:
        return format_of(image)
    except UndecodableImage:  # the examination says why
        return UNKNOWN_FIELD


def _content(value: Any, where: str) -> bytes:
    """What is stored of the value of a field."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except TypeError as error:
        raise SourceError(
            f"{where} is of type {type(value).__name__}, expected bytes, text or JSON"
        ) from error


def _value(element: Any, column: str) -> Any:
    """The value of a column of a dict, a NamedTuple or a Row; dots lead into nested ones."""
    try:
        return reduce(_member, column.split("."), element)
    except (KeyError, AttributeError, TypeError) as error:
        names = [*element] if isinstance(element, Mapping) else getattr(element, "_fields", [])
        raise SourceError(
            f"an element has no column {column!r}, only {', '.join(map(str, names))}; correct the"
            " columns of WriteShards"
        ) from error


def _member(record: Any, name: str) -> Any:
    return record[name] if isinstance(record, Mapping) else getattr(record, name)


def _units_for(num_samples: int) -> int:
    return 1 + num_samples // ROWS_PER_UNIT


def _with_unit(spooled: Spooled, num_units: int) -> tuple[int, Spooled]:
    """A range of hashes for each unit, so that its number changes the order of no samples."""
    return spooled[0] * num_units >> 63, spooled


def _empty_units(_: None, num_units: int) -> Iterator[tuple[int, None]]:
    return ((number, None) for number in range(num_units))
