"""Which columns of a table hold the images and their labels: as the user names them, or by their usual names."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardset.errors import SourceError

PATHS = ("path", "image", "file", "filename", "filepath", "file_name", "file_path", "image_path", "img")
LABELS = ("label", "class", "category", "target", "class_name", "label_name")
"""The usual names, in any case; the first one in these orders counts."""

OTHERS = ("split", "key")
"""Columns with a meaning of their own."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a table; `label` is "" if its images have no labels."""

    path: str
    label: str

    def notes(self) -> Iterator[str]:
        """A sentence on what was taken, unless it is `path` and `label`."""
        if (self.path, self.label) == (PATHS[0], LABELS[0]):
            return
        label = f"the labels from {self.label!r}" if self.label else "no labels"
        yield f"took the images from column {self.path!r} and {label}; --path-column and --label-column name others"


def choose_columns(names: Sequence[str], path: str | None, label: str | None, where: str) -> Columns:
    """The columns that were asked for by `path` and `label`, or else those with usual names; no label is "".

    A table without any further column has no labels. Raises SourceError, which begins with `where` and lists the
    columns, if one that was asked for is missing or none has a usual name.
    """
    for flag, name in (("--path-column", path), ("--label-column", label)):
        if name and name not in names:
            raise _no_column(names, where, f"none is called {name!r}; correct {flag}")
    free = [name for name in names if name not in OTHERS]
    path = path or usual_name(free, PATHS)
    if not path:
        raise _no_column(
            names, where, "expected a header with path and label, optional split and key; name them by --path-column "
            "and --label-column"
        )  # fmt: skip
    free = [name for name in free if name != path]
    if label is None:
        label = usual_name(free, LABELS)
    if label is None and free:
        raise _no_column(
            names, where, "none is called label; name the one with the classes by --label-column, or give "
            "--label-column '' for images without labels"
        )  # fmt: skip
    return Columns(path, label or "")


def usual_name(names: Iterable[str], usual: Sequence[str]) -> str | None:
    """The name among `names` that comes first among the usual ones, in any case; None if there is none."""
    by_usual = {name.strip().casefold(): name for name in reversed([*names])}
    return next((by_usual[name] for name in usual if name in by_usual), None)


def _no_column(names: Sequence[str], where: str, what: str) -> SourceError:
    return SourceError(f"{where}: columns {', '.join(names) or '(none)'}; {what}")
