"""Classes by name, and notes on those that a split lacks."""

from collections.abc import Iterable, Iterator, Sequence

from shardset.format.manifest import ClassInfo

_NUM_EXAMPLES = 5


def class_infos(names: Sequence[str]) -> list[ClassInfo]:
    """The classes of these names, labels from 0."""
    return [ClassInfo(label=label, name=name) for label, name in enumerate(names)]


def missing_notes(seen: Iterable[tuple[str, int]], names: Sequence[str]) -> Iterator[str]:
    """A sentence for each split that lacks classes; `seen` has the (split, label) of every sample."""
    present: dict[str, set[int]] = {}
    for split, label in seen:
        present.setdefault(split, set()).add(label)
    for split, labels in sorted(present.items()):
        missing = [name for label, name in enumerate(names) if label not in labels]
        if missing:
            more = ", ..." if len(missing) > _NUM_EXAMPLES else ""
            noun = "class" if len(missing) == 1 else "classes"
            yield f"split {split} has no images of {len(missing)} {noun}: {', '.join(missing[:_NUM_EXAMPLES])}{more}"
