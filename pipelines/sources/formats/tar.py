"""Walks a tar that others made, strictly: USTAR, GNU or PAX, a whole file or inside another tar.

Python's `tarfile` ends quietly at a truncated or damaged header that is not the first, so half an
archive looks like a short one. This walk ends at the two zero blocks that end a tar, or raises.
"""

import re
import tarfile
from collections.abc import Collection, Iterator
from typing import IO, Any, BinaryIO, cast

from isal import igzip, isal_zlib
from msgspec.structs import replace

from pipelines.sources.base import Extent, Spool
from shardset.checksum import crc32c_of
from shardset.errors import SourceError
from shardset.format.images import other_file
from shardset.format.tar import BLOCK, END
from shardset.storage.base import Stat, Storage

SCATTERED_BYTES = 4096
"""A window for headers that are far apart: what is between them is not worth fetching."""

MAX_HEADER_BYTES = 1 << 20
"""Limit of all headers of one member, with its long names and the like."""

_REMOTE_BYTES = 8 << 20
_NAME = re.compile(rb"[ -~]+")
_SIZE = re.compile(rb"[0-7]{11}[\0 ]")
_SUM = re.compile(rb"[0-7]{6}\0 ")
_MAGIC = (b"ustar\x0000", b"ustar  \0")
_BROKEN = (tarfile.TarError, ValueError, OverflowError, RecursionError)

MAX_UNPACKED_BYTES = 512 << 20
"""The most that a .tar.gz may unpack to: more than any published one does."""

_GzipFile: Any = igzip.GzipFile  # isal does not type its methods
"""The standard library's over ISA-L, which unpacks in 0.5 to 0.6 of zlib's time."""

_BROKEN_GZIP = (igzip.BadGzipFile, cast(type[Exception], isal_zlib.error), EOFError)
"""The errors of igzip for bytes that are truncated or damaged."""


def header_window(storage: Storage) -> int:
    """The best window in bytes to walk members of some 100 KB.

    A request to a bucket takes as long as reading some megabytes, so a bucket is read in large
    windows. On a local disk jumping from header to header is three times as fast as reading 32 KiB
    at each.
    """
    return _REMOTE_BYTES if storage.reads_at_once > 1 else SCATTERED_BYTES


def located(
    file: BinaryIO, storage: Storage, tar: Stat, member: tarfile.TarInfo, spool: Spool
) -> tuple[Extent, bytes]:
    """Where the content of a member is that the walk of `file` has just given.

    In a bucket the walk reads most contents with the headers: then also the content, which the
    build gets too, and the CRC32C of the extent. Else the content is b"".
    """
    extent = Extent(tar.name, tar.generation, member.offset_data, member.size)
    if not storage.is_remote or member.size > _REMOTE_BYTES or reject_reason(member):
        return extent, b""
    content = read_member(file, member)
    extent = replace(extent, crc32c=crc32c_of(content))
    spool.show(extent, content)
    return extent, content


def read_member(file: BinaryIO, member: tarfile.TarInfo) -> bytes:
    """The content of a member."""
    file.seek(member.offset_data)
    return file.read(member.size)


def walk(
    file: BinaryIO, where: str, start: int = 0, stop: int | None = None
) -> Iterator[tarfile.TarInfo]:
    """The members of the tar at [start, stop) of `file`, front to back, without directories.

    `offset_data` counts from the start of `file`, also for a tar inside another one. Contents are
    not read; the caller may seek and read in `file` between members. Ask `reject_reason` before
    using a member. Odd bytes in names that are not UTF-8 are spelled `\\xNN`. Raises SourceError,
    with `where` and the byte offset, at a damaged header, a cut member, or a missing end mark.
    """
    view = _View(file, start, file.seek(0, 2) if stop is None else stop)
    # for writing, as tarfile sees it, so that it reads no member by itself
    archive = tarfile.TarFile(
        fileobj=cast(BinaryIO, view), mode="w", encoding="utf-8", errors="backslashreplace"
    )
    at = start
    while (block := view.read_at(at, BLOCK)).strip(b"\0"):
        # PAX headers of the whole archive hold for all that follow
        member = None if archive.pax_headers else _plain(block, at)
        if member:
            archive.offset = at + BLOCK + -(-member.size // BLOCK) * BLOCK
        else:
            view.seek(at)
            try:
                member = tarfile.TarInfo.fromtarfile(archive)
            except _BROKEN as error:
                raise _damage(view, at, where, error) from error
        if member.size < 0 or member.offset_data <= at:
            raise SourceError(
                f"{where}: member {member.name!r} at byte {at} has the size {member.size}; the"
                " archive is damaged, fetch it again"
            )
        at = archive.offset
        if at > view.stop:
            raise SourceError(
                f"{where}: cut at byte {view.stop} inside {member.name!r}, which starts at byte"
                f" {member.offset_data} and has {member.size} bytes; fetch it again"
            )
        if not member.isdir():
            yield member
    _check_end(view, at, where)


def reject_reason(member: tarfile.TarInfo) -> str | None:
    """Why a member can't be read as a plain file, or None if it can.

    Nothing is ever followed or extracted.
    """
    if member.issym() or member.islnk():
        return f"is a link to {member.linkname!r}; links are not followed"
    if member.issparse():
        return "is a sparse file; store it whole"
    if not member.isreg():
        return f"is no regular file (tar type {member.type!r})"
    if member.name.startswith(("/", "\\")):
        return "has an absolute name"
    if ".." in member.name.replace("\\", "/").split("/"):
        return "has a name that climbs out of its folder"
    return None


class _View:
    """The bytes [start, stop) of a file under the file's own offsets, with a limit on what one
    header may read.

    tarfile believes the size that an extension header states, and reads that much into memory.
    """

    mode = "rb"

    def __init__(self, file: BinaryIO, start: int, stop: int) -> None:
        self.file, self.start, self.stop = file, start, stop
        self.tell = file.tell
        self.seek(start)

    def seek(self, position: int) -> None:
        self.file.seek(position)
        self.allowance = MAX_HEADER_BYTES

    def read(self, num_bytes: int) -> bytes:
        wanted = max(0, min(num_bytes, self.stop - self.file.tell()))
        self.allowance -= wanted
        if self.allowance < 0:
            raise ValueError(f"its extension headers are longer than {MAX_HEADER_BYTES} bytes")
        return self.file.read(wanted)

    def read_at(self, position: int, num_bytes: int) -> bytes:
        self.seek(position)
        return self.read(num_bytes)


def _plain(block: bytes, at: int) -> tarfile.TarInfo | None:
    """The member at `at` if this block alone describes it, as for nearly every image; takes a
    fourth of tarfile's time.

    None leaves it to tarfile: an extension header, anything but a plain file, and whatever looks
    odd.
    """
    name, size, total = block[:100].rstrip(b"\0"), block[124:136], block[148:156]
    is_plain = (
        block[156:157] == tarfile.REGTYPE
        and block[257:265] in _MAGIC
        # neither a prefix of the name nor what GNU tar may put there
        and block[345:] == bytes(BLOCK - 345)
        and _NAME.fullmatch(name)
        and _SIZE.fullmatch(size)
        and _SUM.fullmatch(total)
        and int(total[:6], 8) == sum(block[:345]) - sum(total) + 8 * ord(" ")
    )
    if not is_plain:
        return None
    member = tarfile.TarInfo(name.decode("ascii"))
    member.size, member.offset, member.offset_data = int(size[:11], 8), at, at + BLOCK
    return member


def _check_end(view: _View, at: int, where: str) -> None:
    if view.read_at(at, len(END)) != END:
        raise _damage(view, at, where, "no end mark")
    at += len(END)
    while chunk := view.read_at(at, MAX_HEADER_BYTES):
        if chunk.strip(b"\0"):
            raise SourceError(
                f"{where}: an end mark before byte {at}, then data; either the archive has a hole"
                " (fetch it again) or several were joined (give them one by one)"
            )
        at += len(chunk)


def _damage(view: _View, at: int, where: str, cause: object) -> SourceError:
    """The error that says what is at `at` instead of a header or an end mark."""
    block = view.read_at(at, BLOCK)
    if block and at == view.start and (other := other_file(block, "a tar")):
        return SourceError(f"{where}: {other}")
    if view.stop - at < len(END):
        what = f"{cause} at byte {at}" if block else "no end mark after the last member"
        return SourceError(f"{where}: cut at byte {view.stop}: {what}; fetch it again")
    return SourceError(
        f"{where}: bad tar header at byte {at} ({cause}; it starts {block[:16]!r}); the archive is"
        " damaged, fetch it again"
    )


def read_members(
    file: IO[bytes],
    where: str,
    names: Collection[str],
    *,
    max_bytes: int = MAX_UNPACKED_BYTES,
) -> dict[str, bytes]:
    """The contents of the regular files of these base names in a .tar.gz; missing ones are left
    out.

    Ignores folders, links and special files. Raises SourceError if the archive is truncated or
    damaged, holds one of the names twice, or unpacks to more than `max_bytes` (a few kilobytes can
    unpack to terabytes).
    """
    contents: dict[str, bytes] = {}
    try:
        with _GzipFile(fileobj=file) as unpacked:
            for info in walk(
                unpacked, f"{where}: unpacked to at most {max_bytes} bytes", 0, max_bytes
            ):
                name = info.name.rpartition("/")[2]
                if name not in names or not info.isreg() or info.issparse():
                    continue
                if name in contents:
                    raise SourceError(
                        f"{where}: holds {name} twice, expected it once; download the published"
                        " archive"
                    )
                contents[name] = read_member(unpacked, info)
            # the walk read to the end, whose checksum igzip has compared, or to the limit
            if unpacked.read(1):
                raise SourceError(
                    f"{where}: unpacks to more than {max_bytes} bytes; download the published"
                    " archive"
                )
    except _BROKEN_GZIP as error:
        raise SourceError(
            f"{where}: cut or damaged, expected a whole .tar.gz ({type(error).__name__}: {error});"
            " download it again"
        ) from error
    return contents
