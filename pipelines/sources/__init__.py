"""Opens the sources that `pipelines.config` lists. A new one is a module, and a line in both."""

from collections.abc import Callable

from pipelines.config import INPUT_OPTIONS, SOURCES, BuildConfig
from pipelines.sources.base import Source
from pipelines.sources.cifar import Cifar10, Cifar100
from pipelines.sources.coco import Coco
from pipelines.sources.folder import Folder
from pipelines.sources.huggingface import HuggingFace
from pipelines.sources.imagenet import ImageNet
from pipelines.sources.listing import Listing
from pipelines.sources.objects import refuse_file
from pipelines.sources.shardset import ExistingSet
from pipelines.sources.webdataset import WebDataset, find_tars
from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.program import did_you_mean
from shardset.storage.base import Storage
from shardset.storage.open import open_file, open_storage


def _hugging_face(config: BuildConfig) -> Source:
    is_file = config.input.endswith(".parquet")
    storage, file = open_file(config.input) if is_file else (open_storage(config.input), "")
    return HuggingFace(
        storage, file, config.path_column, config.label_column, config.allow_missing_parts
    )


OPENERS: dict[str, Callable[[BuildConfig], Source]] = {
    "cifar10": lambda config: Cifar10(*Cifar10.find(config.input)),
    "cifar100": lambda config: Cifar100(*Cifar100.find(config.input)),
    "coco": lambda config: Coco(
        open_storage(config.input),
        "",
        annotations=config.annotations,
        masks=config.masks,
    ),
    "folder": lambda config: Folder(open_storage(config.input), config.class_depth),
    "hf": _hugging_face,
    "imagenet": lambda config: ImageNet(open_storage(config.input)),
    "listing": lambda config: Listing(
        *open_file(config.input),
        config.path_column,
        config.label_column,
        config.file_column,
    ),
    "shardset": lambda config: ExistingSet(config.input, manifests.load(config.input).storage),
    "webdataset": lambda config: WebDataset(*find_tars(config.input), config.allow_missing_parts),
}


def open_source(config: BuildConfig) -> Source:
    """The source that a configuration names, over its input; raises ConfigError or SourceError."""
    if config.source not in SOURCES:
        raise ConfigError(
            f"no source {config.source!r}{did_you_mean(config.source, SOURCES)}; there are"
            f" {', '.join(SOURCES)}"
        )
    refuse_foreign_options(config)
    # which say themselves what files they take
    if not config.source.startswith(("cifar", "shardset", "webdataset")):
        refuse_file(config.input, config.source)
    return OPENERS[config.source](config)


def refuse_foreign_options(config: BuildConfig) -> None:
    """Raises ConfigError for options that only other sources take."""
    plain = BuildConfig(source=config.source, input=config.input, output=config.output)
    for option, takers in INPUT_OPTIONS.items():
        is_given = getattr(config, option) != getattr(plain, option)
        if is_given and config.source not in takers:
            flag = f"--{option.replace('_', '-')}"
            raise ConfigError(
                f"{flag} has no meaning for {config.source}, only for {' and '.join(takers)}; leave"
                " it out"
            )


def input_folder(config: BuildConfig) -> Storage | None:
    """The folder with nothing but raw input; None if --input names files, and for tars, which may
    be a shard set.
    """
    is_file = config.input.endswith((".parquet", ".tar.gz", ".tgz"))
    if is_file or config.source in ("listing", "shardset", "webdataset"):
        return None
    return open_storage(config.input)
