"""The pages of a manifest of version 2: workers write them from the records of finished shards, many at a time."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from pipelines.plan import files as plan_files
from pipelines.plan import paths
from pipelines.plan.files import PlanFiles
from pipelines.plan.layout import SplitPlan
from pipelines.plan.records import PlanFile, ShardRecord
from shardset.format import naming
from shardset.format.shards import (
    COUNT_DTYPES,
    SHARDS_PER_COUNT_PAGE,
    SHARDS_PER_PAGE,
    PageFile,
    Shard,
    ShardPages,
    count_page_bytes,
    page_bytes,
)
from shardset.storage.checked import facts_of


class PagePart(msgspec.Struct, frozen=True, kw_only=True):
    """Page `number` of a split with its count pages, and the sums of its shards."""

    split: str
    number: int
    page: PageFile
    count_pages: list[PageFile]
    class_counts: list[int]
    num_content_bytes: int
    fields: list[str]


@dataclass(frozen=True, slots=True)
class PageWriter:
    """Writes the pages of a build; pickles. `suffix` is that of its folders.

    `shards_per_page` is a multiple of `shards_per_count_page`, so that each count page is written by one worker.
    """

    files: PlanFiles
    suffix: str
    shards_per_page: int = SHARDS_PER_PAGE
    shards_per_count_page: int = SHARDS_PER_COUNT_PAGE

    def numbers(self, plan: PlanFile) -> Iterator[tuple[str, int]]:
        """The split and the number of each page of the set."""
        for name, split in plan.splits.items():
            yield from ((name, number) for number in range(-(-split.num_shards // self.shards_per_page)))

    def write(self, plan: PlanFile, split: str, number: int) -> PagePart:
        """Writes a page and its count pages; the bytes depend on the records of their shards only."""
        assert self.shards_per_page % self.shards_per_count_page == 0
        first, sizes = number * self.shards_per_page, plan.splits[split]
        numbers = range(first, min(first + self.shards_per_page, sizes.num_shards))
        totals = np.zeros(plan.num_classes, np.int64)
        # Of the smallest type that holds the samples of a shard: with many classes this is most of the memory.
        counts = np.zeros((min(self.shards_per_count_page, len(numbers)), plan.num_classes), _count_type(sizes))
        shards: list[Shard] = []
        count_pages: list[PageFile] = []
        num_content_bytes, fields = 0, dict[str, None]()
        for record in read_records(self.files, plan, split, numbers):
            row = len(shards) % len(counts)
            counts[row] = record.shard.class_counts
            num_content_bytes += record.num_content_bytes
            fields.update(dict.fromkeys(record.fields))
            shards.append(msgspec.structs.replace(record.shard, class_counts=[]))
            if plan.num_classes and (row + 1 == len(counts) or len(shards) == len(numbers)):
                totals += counts[: row + 1].sum(axis=0, dtype=np.int64)
                path = naming.count_page_path(
                    self.suffix, split, numbers[len(shards) - 1] // self.shards_per_count_page
                )
                count_pages.append(self._put(path, count_page_bytes(counts[: row + 1])))
        return PagePart(
            split=split,
            number=number,
            page=self._put(naming.page_path(self.suffix, split, number), page_bytes(shards)),
            count_pages=count_pages,
            class_counts=totals.tolist(),
            num_content_bytes=num_content_bytes,
            fields=list(fields),
        )

    def pages_of(self, split: str, parts: list[PagePart]) -> ShardPages:
        """The pages of a split in its manifest; `parts` are all of its parts, in order."""
        return ShardPages(
            folder=split + self.suffix,
            shards_per_page=self.shards_per_page,
            pages=[part.page for part in parts],
            class_counts=[*map(sum, zip(*(part.class_counts for part in parts), strict=True))],
            shards_per_count_page=self.shards_per_count_page,
            count_pages=[page for part in parts for page in part.count_pages],
        )

    def _put(self, path: str, data: bytes) -> PageFile:
        with self.files.writer(path) as out:
            out.write(data)
        num_bytes, crc32c = facts_of(data)
        return PageFile(path=path, num_bytes=num_bytes, crc32c=crc32c, sha256=hashlib.sha256(data).hexdigest())


def _count_type(split: SplitPlan) -> np.dtype[Any]:
    return next(dtype for dtype in COUNT_DTYPES if split.shard_size(0) <= np.iinfo(dtype).max)


def read_records(files: PlanFiles, plan: PlanFile, split: str, numbers: range) -> Iterator[ShardRecord]:
    """The records of some shards, in order, read one at a time."""
    names = [paths.record_path(split, number) for number in numbers]
    for name, content in zip(names, files.read_each(names), strict=True):
        record = plan_files.decode_record(files.output, name, content, ShardRecord)
        if record.plan_digest != plan.digest:
            raise plan_files.another_build(files.output, name)
        yield record
