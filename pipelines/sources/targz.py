"""Reads small named members of a .tar.gz: first all of it, so that its checksum covers what is found, and from then on
one member, with a checksum of its own and without what stands behind it. ISA-L unpacks in half of zlib's time.
"""

import io
import tarfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import IO, cast

import google_crc32c
from isal import igzip, isal_zlib

from shardset.errors import SourceError

MAX_MEMBER_BYTES = 256 << 20
MAX_ARCHIVE_BYTES = 512 << 20
_CHUNK_BYTES = 1 << 20
_MAX_EMPTY_READS = 100
"""tarfile skips a member by reading it in pieces of 10 KiB and does not stop at the end; sizes go up to 2**88."""

_BROKEN: tuple[type[Exception], ...] = (
    tarfile.TarError,
    igzip.BadGzipFile,
    cast(type[Exception], isal_zlib.error),
    EOFError,
    OverflowError,
    RecursionError,
    ValueError,
)
"""What igzip and tarfile raise for bytes that are cut, damaged or made to confuse them."""


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in an archive: where it starts when all is unpacked, its size, its CRC32C."""

    offset: int
    num_bytes: int
    crc32c: int


def read_members(
    file: IO[bytes], where: str, *, names: Collection[str], contents_of: Collection[str]
) -> tuple[dict[str, Member], dict[str, bytes]]:
    """Regular files in an archive, and the contents of some, by base name; what is not there is left out.

    The path before the base name is ignored, links and special files are no files. Raises SourceError if the archive
    is cut or damaged, unpacks to more than `MAX_ARCHIVE_BYTES`, or holds one of the names twice.
    """
    try:
        with igzip.GzipFile(fileobj=file) as unzipped:
            limited = _Limited(unzipped, MAX_ARCHIVE_BYTES, where)
            found = _walk(limited, where, names, contents_of)
            while limited.read(_CHUNK_BYTES):
                pass
    except _BROKEN as error:
        raise _damaged(where, error) from error
    return found


def read_member(file: IO[bytes], where: str, member: Member) -> bytes:
    """The content of what `read_members` found; what stands behind it is not unpacked.

    Raises SourceError if it is another content.
    """
    _check_size(member.num_bytes, where)
    try:
        with igzip.GzipFile(fileobj=file) as unzipped:
            for start in range(0, member.offset, _CHUNK_BYTES):
                unzipped.read(min(_CHUNK_BYTES, member.offset - start))
            content = unzipped.read(member.num_bytes)
    except _BROKEN as error:
        raise _damaged(where, error) from error
    if google_crc32c.value(content) != member.crc32c:
        raise SourceError(f"{where}: its CRC32C is another one than when the archive was surveyed; download it again")
    return content


def _damaged(where: str, error: Exception) -> SourceError:
    return SourceError(
        f"{where}: cut or damaged, expected a whole .tar.gz ({type(error).__name__}: {error}); download it again"
    )


def _walk(
    stream: "_Limited", where: str, names: Collection[str], contents_of: Collection[str]
) -> tuple[dict[str, Member], dict[str, bytes]]:
    members: dict[str, Member] = {}
    contents: dict[str, bytes] = {}
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_CHUNK_BYTES) as tar:
        for member in tar:
            name = member.name.rpartition("/")[2]
            if name not in names or not _is_plain(member):
                continue
            if name in members:
                raise SourceError(f"{where}: holds {name} twice, expected it once; download the published archive")
            if name in contents_of:
                _check_size(member.size, f"{where}: {member.name!r}")
            crc, kept = 0, []
            for piece in _pieces(tar, member):
                crc = google_crc32c.extend(crc, piece)
                if name in contents_of:
                    kept.append(piece)
            members[name] = Member(member.offset_data, member.size, crc)
            if name in contents_of:
                contents[name] = b"".join(kept)
    return members, contents


def _is_plain(member: tarfile.TarInfo) -> bool:
    return member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()


def _check_size(num_bytes: int, where: str) -> None:
    if num_bytes > MAX_MEMBER_BYTES:
        raise SourceError(f"{where} has {num_bytes} bytes, expected at most {MAX_MEMBER_BYTES}; do not trust it")


def _pieces(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    file = tar.extractfile(member)
    assert file is not None, "a regular file"
    while piece := file.read(_CHUNK_BYTES):
        yield piece


class _Limited(io.BufferedIOBase):
    """Counts what is unpacked, because a few kilobytes can unpack to terabytes, and reads past the end."""

    def __init__(self, file: igzip.GzipFile, num_bytes: int, where: str) -> None:
        self._file, self._left, self._where = file, num_bytes, where
        self._num_empty = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = self._file.read(size)
        self._left -= len(data)
        self._num_empty += not data
        if self._num_empty > _MAX_EMPTY_READS:
            raise EOFError("a member claims more bytes than there are")
        if self._left < 0:
            raise SourceError(
                f"{self._where}: unpacks to more than {MAX_ARCHIVE_BYTES} bytes, far more than a published archive; "
                "do not trust it"
            )
        return data
