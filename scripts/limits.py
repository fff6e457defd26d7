"""The page "Limits, defaults and exit codes", made from the constants of the code."""

import importlib
import re
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

from pipelines.config import BuildConfig
from shardset import settings
from shardset.storage.retry import RetryPolicy, policy_of_process, while_someone_waits
from trainer.config import TrainConfig

Show = Callable[[Any], str]


def size(value: int) -> str:
    """A number of bytes in words."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= unit:
            return f"{value / unit:,.0f} {name}"
    return f"{value} bytes"


def seconds(value: float) -> str:
    """A time in words."""
    return f"{value / 60:g} minutes" if value >= 120 and not value % 60 else f"{value:g} s"


def percent(value: float) -> str:
    """A share in words."""
    return f"{100 * value:g} %"


def count(value: int) -> str:
    """A number."""
    return f"{value:,}"


SETTINGS: dict[str, tuple[str, Show]] = {
    "stall_timeout_s": ("time without a step after which a run ends", seconds),
    "log_every_steps": ("steps between two lines of the log", count),
    "keep_checkpoints": ("checkpoints that are kept, with the best one", count),
}
BUILD: list[tuple[str, str, Show]] = [
    ("size of a shard, without `--num-shards`", "pipelines.plan.layout:TARGET_SHARD_BYTES", size),
    ("bad images that pass in a small split", "pipelines.plan.summaries:ALLOWED_BAD", count),
    ("files per unit of `folder`", "pipelines.sources.folder:ENTRIES_PER_UNIT", count),
    ("rows per unit of `listing`", "pipelines.sources.listing:ENTRIES_PER_UNIT", count),
    ("rows per unit of `hf`", "pipelines.sources.huggingface:ROWS_PER_UNIT", count),
    (
        "input per worker process on this machine",
        "pipelines.runners.in_process:BYTES_PER_WORKER",
        size,
    ),
    ("text of a field that travels with its sample", "pipelines.plan.index:MAX_INLINE_BYTES", size),
    ("images on the page after a build", "pipelines.report.set_page:IMAGES_AFTER_BUILD", count),
    ("images that `report` decodes", "pipelines.report.set_page:IMAGES", count),
]
FORMAT: list[tuple[str, str, Show]] = [
    ("length of a key", "shardset.format.naming:MAX_KEY_BYTES", size),
    ("length of a field's name", "shardset.format.naming:MAX_FIELD_BYTES", size),
    ("size of a member", "shardset.format.tar:MAX_MEMBER_BYTES", size),
    ("fields of a split", "shardset.format.rows:MAX_FIELDS", count),
    ("largest label", "shardset.format.labels:MAX_LABEL", count),
    ("size of a file on `s3://` and `az://`", "shardset.storage.s3:MAX_BYTES", size),
    ("version of the format", "shardset.format.manifest:VERSION", count),
    ("version of the order", "shardset.order.permutation:ORDER_VERSION", count),
]
IMAGES: list[tuple[str, str, Show]] = [
    ("pixels of an image", "shardset.format.images:MAX_PIXELS", count),
    ("memory to decode images, per process", "shardset.format.images.limits:DECODED_BYTES", size),
    ("scans of a JPEG", "shardset.format.images.limits:MAX_SCANS", count),
]
READER: list[tuple[str, str, Show]] = [
    ("memory of a stream, `budget_bytes`", "shardset.order.budget:BUDGET_BYTES", size),
    ("of it for indexes, at most", "shardset.order.budget:INDEX_BUDGET_BYTES", size),
    ("size of a block", "shardset.order.budget:READ_BYTES", size),
    ("window, `window`", "shardset.order.budget:DEFAULT_WINDOW", count),
    ("lanes, `num_lanes`", "shardset.order.lanes:DEFAULT_LANES", count),
    ("lanes that the default may reach", "shardset.order.lanes:MAX_DEFAULT_LANES", count),
    ("batches ahead, `prefetch`", "shardset.order.budget:PREFETCH", count),
    ("decoding processes, for small images", "shardset.stream.source:MAX_WORKERS", count),
    ("samples from which they are used", "shardset.stream.source:MIN_DECODED", count),
    ("concurrent reads from a bucket", "shardset.storage.many:REQUESTS_AT_ONCE", count),
    ("unwanted samples per wanted one in a view", "shardset.order.blocks:GAP_SHARE", percent),
    ("reads that may be sent twice", "shardset.read.remote:MAX_HEDGED", percent),
]
STORAGE = {
    "connect_timeout_s": "wait for a connection",
    "stall_timeout_s": "silence after which a request counts as lost",
    "give_up_after_s": "without progress, then an error",
    "throttled_give_up_after_s": "the same while the server answers 429 or 503",
    "warn_after_s": "failures after which a warning is logged",
    "first_pause_s": "first pause; pauses double",
    "max_pause_s": "longest pause",
    "deadline_s": "limit of a request in all",
}
RUNS: list[tuple[str, str, Show]] = [
    ("renewal of the lease of a run folder", "trainer.run_folder.lock:BEAT_S", seconds),
    ("age at which a lease is free", "trainer.run_folder.lock:PATIENCE_S", seconds),
    ("port of the heartbeat", "trainer.runtime.heartbeat:PORT", str),
    ("heartbeat", "trainer.runtime.heartbeat:TIMING.beat_s", seconds),
    ("silence of a lost process", "trainer.runtime.heartbeat:TIMING.silent_s", seconds),
    ("wait for all processes at the start", "trainer.runtime.heartbeat:TIMING.join_s", seconds),
    ("time to end after a loss", "trainer.runtime.heartbeat:TIMING.grace_s", seconds),
    ("worst samples on the page of a run", "trainer.telemetry.evaluation:NUM_WORST", count),
    ("rows that `explain` prints", "shardset.terminal:MAX_ROWS", count),
    ("grace of a GKE job", "trainer.tools.job:GRACE_S", seconds),
    ("restarts of a GKE job", "trainer.tools.job:MAX_RESTARTS", count),
]
EXIT_CODES = [
    ("shardset.program:OK", "success"),
    (
        "shardset.program:FAILED",
        "failed, or the data are damaged; the last line on stderr says why, `--debug` shows the"
        " traceback",
    ),
    ("shardset.program:USAGE", "wrong command line"),
    (
        "shardset.program:PREEMPTED",
        "`train` was asked to stop (SIGTERM) and saved everything; the same command resumes",
    ),
    ("shardset.program:INTERRUPTED", "stopped by Ctrl-C; the same command resumes"),
]
LIBRARIES = ("torch", "torch_xla", "torchvision", "timm", "apache-beam", "pillow", "numpy")


def limits_page() -> str:
    """All limits and defaults that other pages refer to."""
    parts = [
        "# Limits, defaults and exit codes\n\nGenerated from the constants of the code.",
        table(
            "Exit codes", ["code", "meaning"], ((str(found(at)), text) for at, text in EXIT_CODES)
        ),
        "A shell reports a process that was killed by signal N as 128 + N, such as 137.",
        constants(
            "Builds",
            BUILD,
            [
                (
                    "bad images of a split",
                    percent(settings.settings_of(BuildConfig)["max_bad_fraction"].default),
                )
            ],
        ),
        constants("Format", FORMAT),
        constants("Images", IMAGES),
        "[Image formats](images.md#limits) has the memory per format.",
        constants("Reading", READER),
        storage(),
        constants("Runs", RUNS, run_settings()),
        libraries(),
    ]
    return "\n\n".join(parts) + "\n"


def found(address: str) -> Any:
    """The value at `module:NAME` or `module:NAME.attribute`."""
    module, _, path = address.partition(":")
    value = importlib.import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    return value


def table(title: str, heads: list[str], rows: Iterable[Iterable[str]]) -> str:
    """A section with one table."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    head = "| " + " | ".join(heads) + " |"
    return "\n".join([f"## {title}", "", head, "|" + "---|" * len(heads), *lines])


def constants(
    title: str, rows: list[tuple[str, str, Show]], more: Iterable[tuple[str, str]] = ()
) -> str:
    """A section with one constant per row."""
    values = [*more, *((text, show(found(at))) for text, at, show in rows)]
    return table(title, ["limit or default", "value"], values)


def run_settings() -> Iterable[tuple[str, str]]:
    """Defaults of settings of a run."""
    known = settings.settings_of(TrainConfig)
    for key, (text, show) in SETTINGS.items():
        yield f"{text}, `{key}`", show(known[key].default)


def storage() -> str:
    """How often and how long storage is asked, in programs and for a person who waits."""
    usual = RetryPolicy()
    with while_someone_waits():
        waiting = policy_of_process()

    def shown(policy: RetryPolicy, name: str) -> str:
        value = getattr(policy, name)
        return "none" if value == float("inf") else seconds(value)

    rows = ((text, shown(usual, name), shown(waiting, name)) for name, text in STORAGE.items())
    return table("Storage", ["", "builds and runs", "`inspect`, `estimate`, `explain`"], rows)


def libraries() -> str:
    """The versions of Python and of the large libraries that the distribution allows."""
    rows = [("Python", "", metadata.metadata("shardset")["Requires-Python"])]
    extras: dict[tuple[str, str], list[str]] = {}
    for text in metadata.requires("shardset") or []:
        library, _, marker = text.partition(";")
        name, version = re.split(r"(?<=[\w\]])(?=[<>=])", library.strip() + "=", maxsplit=1)
        extra = re.search(r"extra == .(\w+)", marker)
        key = (re.sub(r"\[.*", "", name).lower(), version.rstrip("="))
        extras.setdefault(key, []).append(extra[1] if extra else "")
    for library in LIBRARIES:
        rows += [
            (
                name,
                " ".join(f"`[{one}]`" for one in dict.fromkeys(by) if one != "dev" and one),
                version,
            )
            for (name, version), by in extras.items()
            if name == library
        ]
    cells = ((name, by, f"`{version}`") for name, by, version in rows)
    return table("Versions", ["library", "extra", "allowed"], cells)
