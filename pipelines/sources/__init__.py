"""The sources by name. A new one is a module of its own and one line in SOURCES."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipelines.sources.base import Source
from pipelines.sources.cifar import Cifar10, Cifar100
from pipelines.sources.folder import Folder
from pipelines.sources.holdout import Holdout
from pipelines.sources.imagenet import ImageNet
from pipelines.sources.listing import Listing
from pipelines.sources.webdataset import WebDataset, find_tars
from shardset.errors import ConfigError
from shardset.storage.base import Storage
from shardset.storage.open import open_file, open_storage

if TYPE_CHECKING:
    from pipelines.config import BuildConfig


def _cifar(kind: type[Cifar10] | type[Cifar100]) -> Callable[["BuildConfig"], Source]:
    def open_cifar(config: "BuildConfig") -> Source:
        return kind(*kind.find(config.input), "ppm" if config.image.image_format == "ppm" else "png")

    return open_cifar


def _folder(config: "BuildConfig") -> Source:
    return Folder(open_storage(config.input), Holdout(config.holdout, config.seed))


def _listing(config: "BuildConfig") -> Source:
    holdout = Holdout(config.holdout, config.seed)
    return Listing(*open_file(config.input), holdout, within_input=config.within_input)


SOURCES: dict[str, Callable[["BuildConfig"], Source]] = {
    "cifar10": _cifar(Cifar10),
    "cifar100": _cifar(Cifar100),
    "folder": _folder,
    "imagenet": lambda config: ImageNet(open_storage(config.input)),
    "listing": _listing,
    "webdataset": lambda config: WebDataset(*find_tars(config.input)),
}

TAKES_HOLDOUT = frozenset({"folder", "listing"})


def open_source(config: "BuildConfig") -> Source:
    """The source that a configuration names, over its input; raises ConfigError or SourceError."""
    if config.source not in SOURCES:
        raise ConfigError(f"no source {config.source!r}; there are {', '.join(sorted(SOURCES))}")
    if config.holdout and config.source not in TAKES_HOLDOUT:
        raise ConfigError(f"--holdout has no meaning for {config.source}, which has splits of its own; leave it out")
    if config.within_input and config.source != "listing":
        raise ConfigError("--within-input is for listings, which alone say where images are; leave it out")
    return SOURCES[config.source](config)


def input_folder(config: "BuildConfig") -> Storage | None:
    """The folder with nothing but raw input; None if --input names files, and for tars, which may be a shard set."""
    if config.source in ("listing", "webdataset"):
        return None
    if config.source.startswith("cifar") and config.input.endswith((".tar.gz", ".tgz")):
        return None
    return open_storage(config.input)
