"""What the schema of a Parquet file with images says: which columns hold the images, the labels and everything else."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipelines.holdout import Label
from pipelines.sources.formats import parquet
from pipelines.sources.formats.records import PATHS, Columns, choose_columns, usual_name
from shardset.errors import SourceError

NO_LABEL = -1
MAX_LABEL = 1_000_000


@dataclass(frozen=True, slots=True)
class ImageTable:
    """What a schema says: the columns, the class names if it has them, the columns that go into `json`, and the rest.

    `label_type` is "none", "number" or "text".
    """

    columns: Columns
    names: tuple[str, ...] | None
    label_type: str
    has_paths: bool
    extra: tuple[str, ...]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, schema: pa.Schema, image: str | None, label: str | None, where: str) -> "ImageTable":
        """Raises SourceError if there is no column of images, or no telling which one has the labels."""
        features = _features(schema)
        class_labels = [name for name, feature in features.items() if feature.get("_type") == "ClassLabel"]
        if label is None and len(class_labels) == 1:
            [label] = class_labels
        columns = choose_columns(schema.names, _image_column(schema, image, where), label, where)
        rest = [name for name in schema.names if name not in (columns.path, columns.label)]
        extra = [name for name in rest if not parquet.holds_bytes(schema.field(name).type)]
        names = features.get(columns.label, {}).get("names")
        return cls(
            columns=columns,
            names=tuple(map(str, names)) if isinstance(names, list) and names else None,
            label_type=_label_type(schema, columns.label, where),
            has_paths=_has_paths(schema.field(columns.path).type),
            extra=tuple(extra),
            left_out=tuple(name for name in rest if name not in extra),
        )

    @property
    def leaves(self) -> list[str]:
        """The columns that the survey reads."""
        paths = [f"{self.columns.path}.path"] if self.has_paths else []
        return [self.columns.label, *paths] if self.columns.label else paths

    def label_and_path(self, record: dict[str, Any]) -> list[Any]:
        """The label of a row, NO_LABEL if it has none, and the path of its image, "" if it has none."""
        label = record.get(self.columns.label)
        path = (record.get(self.columns.path) or {}).get("path") if self.has_paths else None
        return [NO_LABEL if label in (None, "") else label, path or ""]

    def class_names(self, labels: set[Label]) -> list[str]:
        """The names of the classes in the order of their labels; `labels` are those of all rows."""
        if self.names is not None:
            return list(self.names)
        if self.label_type == "text":
            return sorted(str(label) for label in labels - {NO_LABEL})
        numbers = [int(label) for label in labels if int(label) <= MAX_LABEL]
        return [str(label) for label in range(max(numbers, default=NO_LABEL) + 1)]

    def refuse_other(self, other: "ImageTable", where: str) -> None:
        """Raises SourceError if another file has other columns or classes."""
        for what in ("columns", "names", "label_type", "extra"):
            mine, its = getattr(self, what), getattr(other, what)
            if mine != its:
                raise SourceError(
                    f"{where}: its {what.replace('_', ' ')} are {its!s:.200}, those of the first file "
                    f"{mine!s:.200}; expected files of one data set: name one file or folder as input"
                )

    def notes(self) -> Iterator[str]:
        """Sentences on the columns that were taken, and on those that were not."""
        yield from self.columns.notes()
        if self.left_out:
            yield f"left out the columns {', '.join(self.left_out)}, which hold bytes"


def _features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """What the library datasets notes about each column; nothing if another program wrote the file."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}


def _image_column(schema: pa.Schema, wanted: str | None, where: str) -> str:
    images = [name for name in schema.names if _is_image(schema.field(name).type)]
    if not images:
        raise SourceError(
            f"{where}: columns {', '.join(schema.names)}; none holds images (bytes, or bytes and path); a table of "
            "paths is read by --source listing"
        )
    column = wanted or (images[0] if len(images) == 1 else usual_name(images, PATHS))
    if not column or column not in images:
        raise SourceError(
            f"{where}: images are in the columns {', '.join(images)}"
            + (f", not in {column}; correct --image-column" if column else "; choose one by --image-column")
        )
    return column


def _is_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(each.name == "bytes" and _is_image(each.type) for each in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _has_paths(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind)) and any(each.name == "path" for each in kind)


def _label_type(schema: pa.Schema, column: str, where: str) -> str:
    if not column:
        return "none"
    kind = schema.field(column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_integer(kind):
        return "number"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "text"
    raise SourceError(f"{where}: labels in column {column} are {kind}, expected whole numbers or texts; name another")
