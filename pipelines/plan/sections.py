"""Indexes a large unit in sections, on several workers, and joins them to the table that one worker would write.

A section begins at a border that its worker found by a search. It counts only if the section before it ends there, and
if its keys differ from all before it; otherwise it is indexed again, from where the one before it ends.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import msgspec

from pipelines.config import BuildConfig
from pipelines.plan import paths, tables
from pipelines.plan.files import PlanFiles
from pipelines.plan.index import read_samples
from pipelines.plan.summaries import UnitSummary, summarize_table
from pipelines.plan.survey import UnitRef, UnitSection, read_unit
from pipelines.sources.base import Border, Section, SectionedSource
from shardset.decodable import decodable
from shardset.errors import SourceError
from shardset.storage.checked import read_again


@decodable
class IndexedSection(msgspec.Struct, frozen=True, kw_only=True):
    """The table of a section of a unit, with its borders and keys; `begins` is None if it could not be read."""

    begins: Border | None
    ends: Border | None = None
    keys: list[str] = []
    table: bytes = b""


class JoinedUnit(NamedTuple):
    """The summary of a unit that was read in sections, and how many of them were indexed again."""

    summary: UnitSummary
    num_again: int


def index_section(files: PlanFiles, source: SectionedSource, config: BuildConfig, section: UnitSection) -> None:
    """Writes the table of a section, unless an earlier attempt of the same build left it or that of the whole unit."""
    number = section.unit.number
    path = paths.section_path(number, section.number)
    if files.find(paths.summary_path(number)) or files.find(path):
        return
    unit, spool_path = read_unit(files.output, section.unit), paths.spool_path(number, f"-{section.number:05d}")
    try:
        begin = partial(source.find_section, unit, section.number)
        indexed = _index(files, source, config, begin, spool_path)
    except SourceError:
        if section.number == 0:
            raise
        indexed = IndexedSection(begins=None)  # its begin was only a guess; if the unit is damaged, the join says so
    files.write(path, msgspec.msgpack.encode(indexed))


def join_sections(files: PlanFiles, source: SectionedSource, config: BuildConfig, unit: UnitRef) -> JoinedUnit:
    """Writes the table and the summary of a unit whose sections are indexed, unless an earlier attempt left them."""
    table_path, summary_path = paths.unit_path(unit.number), paths.summary_path(unit.number)
    if summary := files.find_record(summary_path, UnitSummary):
        return JoinedUnit(summary, 0)
    num_again = 0
    if content := files.find(table_path):
        table = tables.unit_from_bytes(content)
    else:
        sections, again = zip(*_in_order(files, source, config, unit), strict=True)
        table, num_again = tables.concat_units([tables.unit_from_bytes(one.table) for one in sections]), sum(again)
        files.write(table_path, tables.unit_to_bytes(table))
    summary = summarize_table(unit.number, table)
    files.write(summary_path, msgspec.json.encode(summary))
    return JoinedUnit(summary, num_again)


def _in_order(
    files: PlanFiles, source: SectionedSource, config: BuildConfig, ref: UnitRef
) -> Iterator[tuple[IndexedSection, bool]]:
    """The sections of a unit, each from where the one before ends, and whether it was indexed again for that."""
    unit, seen = read_unit(files.output, ref), set[str]()
    border: Border | None = Border()
    while border:
        data = files.read(paths.section_path(ref.number, border.section))
        section = msgspec.msgpack.decode(data, type=IndexedSection)
        is_wrong = section.begins != border or not seen.isdisjoint(section.keys)
        if is_wrong:
            # A spool of its own: a late worker may still write that of the first attempt.
            spool_path = paths.spool_path(ref.number, f"-{border.section:05d}-again")
            section = _index(files, source, config, partial(source.section, unit, border, seen), spool_path)
        yield section, is_wrong
        seen.update(section.keys)
        border = section.ends


def _index(
    files: PlanFiles, source: SectionedSource, config: BuildConfig, begin: Callable[[], Section], spool_path: str
) -> IndexedSection:
    def read() -> IndexedSection:
        section = begin()
        rows, rejected = read_samples(files, source, config, section.samples, spool_path)
        table = bytes(tables.unit_to_bytes(tables.unit_table(rows, rejected)))
        return IndexedSection(begins=section.begins, ends=section.ends, keys=section.keys, table=table)

    return read_again(read)
