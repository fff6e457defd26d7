"""Verifies a whole shard set: each shard, and all of them against the manifest and the folders."""

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.check.problems import Problem, check_quarantine, lines_of, problem_of
from pipelines.check.shard_check import ShardFindings, ShardTask, check_shard
from pipelines.export.stale import STALE, stale
from pipelines.images.options import options_to_read
from pipelines.write.set_files import SetFiles, listed_by
from shardset.errors import ConfigError, DamagedShard, NotFound, StorageError
from shardset.format import manifest as manifests
from shardset.format.manifest import Manifest
from shardset.format.shards import SHARD_DTYPE
from shardset.format.table import rows_of
from shardset.format.write import digest_of_tars
from shardset.program import count
from shardset.read.query import repeated
from shardset.storage.base import Storage
from shardset.storage.checked import read_object
from shardset.storage.many import OBJECTS_AT_ONCE

MEMORY_BYTES = 2 * 2**30
"""Memory for deep verification, which holds one whole tar per worker: limits the number of workers.
"""

_RESTORE = "restore or rebuild the shard set"

MIN_PROCESS_BYTES = 64 * 2**20
"""A pool of processes takes about a second to start: for fewer bytes of shards, threads are faster.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The verified shards and every problem, in manifest order.

    `num_samples`, `num_images` and `num_bytes` count what was read: without `deep` no image, and no
    byte of an object whose storage keeps a CRC32C.
    """

    url: str
    digest: str
    deep: bool
    num_shards: int
    num_samples: int
    num_images: int
    num_bytes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems


ShowProgress = Callable[[int, int, int], None]
"""Receives the numbers of shards that were checked, of all shards, and of bytes that were read."""


def verify(url: str, *, deep: bool, progress: ShowProgress | None = None) -> VerifyReport:
    """Every problem of the shard set at `url` (its manifest or folder, or a view of it, which is
    checked too).

    Shallow: every listed object exists with its size and CRC32C, no unlisted shard is next to them,
    the quarantine list has the listed length. Deep: also reads each tar and index, compares them
    with each other and with the manifest, decodes every image, and checks that keys are unique over
    all splits. Uses all cores; processes if the shards hold MIN_PROCESS_BYTES or more. Raises
    ManifestError without a valid manifest.
    """
    loaded = manifests.load(url).without_view()
    manifest, storage = loaded.manifest, loaded.storage
    image = options_to_read(manifest)
    tasks = [
        ShardTask(
            storage=storage,
            split_name=name,
            split=split,
            shard=shard,
            num_classes=len(manifest.classes),
            categories=manifest.labels_by_category,
            image=image,
            deep=deep,
            is_own=manifest.is_own,
        )
        for name, split in manifest.splits.items()
        for shard in split.shards
    ]
    checked = _check_all(tasks, progress)
    problems = [
        *_table_problems(storage, manifest),
        *(problem for findings in checked for problem in findings.problems),
        *_unlisted(storage, manifest),
        *check_quarantine(storage, manifest.quarantine)[1],
    ]
    if deep:
        problems += _split_problems(manifest, tasks, checked)
        problems += _repeated_keys(tasks, checked)
    totals = {
        name: sum(getattr(findings, name) for findings in checked)
        for name in ("num_samples", "num_images", "num_bytes")
    }
    return VerifyReport(
        url=url,
        digest=manifest.digest,
        deep=deep,
        num_shards=len(tasks),
        problems=tuple(problems),
        **totals,
    )


def lines(report: VerifyReport, *, max_problems: int = 100) -> list[str]:
    """The report as lines for a terminal: the first `max_problems` problems, then one line that
    sums up.
    """
    problems = lines_of(report.problems, max_problems, " (all of them with --json)")
    outcome = count(len(report.problems), "problem") if report.problems else "no problem"
    images = f", {count(report.num_images, 'image')} decoded" if report.num_images else ""
    return [
        *problems,
        f"verified {count(report.num_shards, 'shard')}, {count(report.num_samples, 'sample')},"
        f" {report.num_bytes:,} bytes read{images}: {outcome}",
    ]


def _check_all(tasks: list[ShardTask], progress: ShowProgress | None) -> list[ShardFindings]:
    with _executor(tasks) as executor:
        futures = [executor.submit(check_shard, task) for task in tasks]
        num_bytes = 0
        for done, future in enumerate(as_completed(futures), 1):
            num_bytes += future.result().num_bytes
            if progress:
                progress(done, len(tasks), num_bytes)
    return [future.result() for future in futures]


def _executor(tasks: list[ShardTask]) -> Executor:
    if not tasks or not tasks[0].deep:
        return ThreadPoolExecutor(OBJECTS_AT_ONCE)
    sizes = [task.shard.num_bytes for task in tasks]
    workers = min(os.cpu_count() or 1, len(tasks), max(1, MEMORY_BYTES // max(sizes)))
    # Other processes can't see a memory:// set, and one worker gains nothing from a process.
    if not tasks[0].storage.is_shared or workers == 1 or sum(sizes) < MIN_PROCESS_BYTES:
        return ThreadPoolExecutor(workers)
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def _table_problems(storage: Storage, manifest: Manifest) -> Iterator[Problem]:
    """Differences from the manifest in the tables of shards,
    whose rows have fitted their checks.
    """
    for name, split in manifest.splits.items():
        for group in split.groups:
            try:
                data = read_object(
                    storage, group.table, group.table_bytes, group.table_crc32c, _RESTORE
                )
            except (DamagedShard, StorageError) as error:
                yield problem_of(group.table, error)
                continue
            if digest_of_tars(rows_of(data, SHARD_DTYPE)) != group.tars_sha256:
                text = f"its SHA-256 of tars differs from the manifest's; {_RESTORE}"
                yield Problem(group.table, text)
        sizes = [shard.num_bytes for shard in split.shards]
        listed, expected = (sum(sizes), max(sizes)), (split.num_tar_bytes, split.max_tar_bytes)
        if listed != expected:
            yield Problem(
                f"split {name}",
                f"the bytes of its tars and of the largest tar are {listed} in the table, the"
                f" manifest says {expected}; {_RESTORE}",
            )


def _unlisted(storage: Storage, manifest: Manifest) -> Iterator[Problem]:
    files, names = SetFiles(storage), set[str]()
    for split in manifest.splits if manifest.is_own else ():
        try:
            names |= files.shards_of(split)
        except ConfigError:  # a web server, which no reader lists either
            return
        except StorageError as error:
            yield Problem(split, f"can't be listed: {error}")
    with suppress(NotFound):  # the newest version, where the verified one may be a copy of it
        newest = manifests.read_head(storage)
        if newest.is_own:
            yield from (Problem(name, STALE) for name in stale(storage, newest))
    for name in sorted(files.strays(names - listed_by(manifest))):
        yield Problem(
            name,
            "is in no version of the set, but a reader that lists the folder would read it; remove "
            "it, or repeat the `compact` that was stopped",
        )


def _split_problems(
    manifest: Manifest, tasks: list[ShardTask], checked: list[ShardFindings]
) -> Iterator[Problem]:
    for name, split in manifest.splits.items():
        shards = [
            findings
            for task, findings in zip(tasks, checked, strict=True)
            if task.split_name == name
        ]
        # a damaged shard lacks samples, which has been reported
        if any(findings.problems for findings in shards):
            continue
        labels = sum((findings.labels for findings in shards), Counter[int]())
        num_content_bytes = sum(findings.num_content_bytes for findings in shards)
        totals = [
            ("bytes of samples", num_content_bytes, split.num_content_bytes),
            *(
                (f"samples of class {label}", labels[label], expected)
                for label, expected in enumerate(split.class_totals)
            ),
        ]
        for what, total, expected in totals:
            if total != expected:
                yield Problem(
                    f"split {name}",
                    f"holds {total} {what}, the manifest says {expected}; rebuild the set",
                )


def _repeated_keys(tasks: list[ShardTask], checked: list[ShardFindings]) -> Iterator[Problem]:
    """The keys that occur again."""
    keys = [findings.keys for findings in checked]
    again = repeated(pa.chunked_array(keys, pa.large_string()))
    first: dict[str, str] = {}
    for task, of_shard in zip(tasks, keys, strict=True):
        for key in of_shard.filter(pc.is_in(of_shard, again)).to_pylist():
            if key in first:
                text = f"has a sample {key} as {first[key]} has; rebuild the set"
                yield Problem(task.shard.path, text)
            first.setdefault(key, task.shard.path)
