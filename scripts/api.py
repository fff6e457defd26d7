"""The page "Python API", made from the public names, the adapters and the errors."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import pipelines
import shardset
from shardset.errors import ShardsetError

REPOSITORY = Path(__file__).parent.parent
API = {
    "Read a dataset": (
        "Stream Batch StreamOptions MixedStream Share DiskCache open SampleSet Sample"
    ),
    "Images and augmentation": (
        "ImageSpec RandomResizedCrop CenterCrop PadCrop"
        " RandAugment TrivialAugment RandomErasing Chain"
    ),
    "Write a dataset": "Writer",
    "Look at a dataset": "load LoadedSet Manifest Split Shard open_storage Storage",
}
"""The public names in the order of the page; those that are missing here come at the end."""
FULL_PATH = "    options:\n      show_root_full_path: true\n"
NO_MEMBERS = FULL_PATH + "      members: false\n"
API_HEAD = """\
# Python API

**What is public.** The names on this page: `shardset.NAME`, `pipelines.NAME`, the modules of
`shardset.adapters`, `shardset.testing.StorageTests` and the errors of `shardset.errors`, with the
parameters, attributes and methods that are listed here.

**What may change.** Until version 1.0, any version may rename, remove or redefine a public name.
The [change log](../changelog.md) then says so and names the replacement. New names, and options
with a default, may come at any time. The text of a message may change. Everything else,
including the other modules of `pipelines` and `trainer`, is internal and changes without notice.
The [format on disk](format.md) and the [order of an epoch](../explanation/order.md) have separate
version numbers. A stream refuses a state that was saved with another order.

`pip install 'shardset[read]'` brings the decoders that `Stream` needs. `import shardset` imports
neither torch nor Beam.

A test runs the examples as they are, on datasets `shards` and `others` of 20 JPEGs of 40 x 50
pixels. The [quickstart](../tutorials/quickstart.md) makes a dataset `shards` of your images.
"""


def api_page() -> str:
    """The public names of the library, its adapters, and the tree of its errors."""
    text, groups = API_HEAD, {title: names.split() for title, names in API.items()}
    named = [name for names in groups.values() for name in names]
    public = [name for name in shardset.__all__ if name not in ("ShardsetError", "__version__")]
    groups["More names"] = [name for name in public if name not in named]
    for title, names in groups.items():
        text += f"\n## {title}\n\n" if names else ""
        text += "".join(
            f"::: shardset.{home_of(name)}{name}\n\n" for name in names if name in public
        )
    text += "\n## Beam pipelines\n\n"
    text += "".join(
        f"::: {getattr(pipelines, name).__module__}.{name}\n\n" for name in pipelines.__all__
    )
    modules = sorted(path.stem for path in (REPOSITORY / "shardset/adapters").glob("[a-z]*.py"))
    text += "\n## Adapters\n\n"
    text += "".join(f"::: shardset.adapters.{name}\n{FULL_PATH}\n" for name in modules)
    text += f"\n## Test a storage\n\n::: shardset.testing.StorageTests\n{NO_MEMBERS}\n"
    return text + "\n## Errors\n\n" + "\n".join(errors_below(ShardsetError, 0)) + "\n"


def home_of(name: str) -> str:
    """The module of a public name below `shardset`, with a dot after it."""
    lazily = {name: module for module, names in shardset._READER.items() for name in names.split()}
    module = getattr(getattr(shardset, name), "__module__", "shardset").removeprefix("shardset")
    return f"{lazily.get(name, module.lstrip('.'))}."


def errors_below(error: type[ShardsetError], depth: int) -> Iterator[str]:
    """A line per error of the library, below the one that it is a kind of."""
    meaning = (inspect.getdoc(error) or "").split("\n\n")[0].replace("\n", " ")
    yield f"{'    ' * depth}- `{error.__name__}`: {meaning}"
    for kind in error.__subclasses__():
        if kind.__module__ == "shardset.errors":
            yield from errors_below(kind, depth + 1)
