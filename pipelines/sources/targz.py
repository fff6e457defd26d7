"""Reads small named members of a .tar.gz, the whole of it, so that its checksum covers what is returned."""

import gzip
import io
import tarfile
import zlib
from collections.abc import Collection
from typing import IO

from shardset.errors import SourceError

MAX_MEMBER_BYTES = 256 << 20
MAX_ARCHIVE_BYTES = 512 << 20
_CHUNK_BYTES = 1 << 20
_MAX_EMPTY_READS = 100
"""tarfile skips a member by reading it in pieces of 10 KiB and does not stop at the end; sizes go up to 2**88."""

_BROKEN = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, OverflowError, RecursionError, ValueError)
"""What gzip and tarfile raise for bytes that are cut, damaged or made to confuse them."""


def read_members(
    file: IO[bytes], where: str, *, sizes_of: Collection[str], contents_of: Collection[str]
) -> tuple[dict[str, int], dict[str, bytes]]:
    """The sizes, and of some the contents, of regular files in an archive, by base name; what is not there is left out.

    The path before the base name is ignored, links and special files are no files. Raises SourceError if the archive
    is cut or damaged, unpacks to more than `MAX_ARCHIVE_BYTES`, or holds one of the names twice.
    """
    try:
        with gzip.GzipFile(fileobj=file) as unzipped:
            limited = _Limited(unzipped, MAX_ARCHIVE_BYTES, where)
            found = _walk(limited, where, sizes_of, contents_of)
            while limited.read(_CHUNK_BYTES):
                pass
    except _BROKEN as error:
        raise SourceError(
            f"{where}: cut or damaged, expected a whole .tar.gz ({type(error).__name__}: {error}); download it again"
        ) from error
    return found


def _walk(
    stream: "_Limited", where: str, sizes_of: Collection[str], contents_of: Collection[str]
) -> tuple[dict[str, int], dict[str, bytes]]:
    sizes: dict[str, int] = {}
    contents: dict[str, bytes] = {}
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            name = member.name.rpartition("/")[2]
            if name not in sizes_of or not _is_plain(member):
                continue
            if name in sizes:
                raise SourceError(f"{where}: holds {name} twice, expected it once; download the published archive")
            sizes[name] = member.size
            if name in contents_of:
                contents[name] = _content(tar, member, where)
    return sizes, contents


def _is_plain(member: tarfile.TarInfo) -> bool:
    return member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, where: str) -> bytes:
    if member.size > MAX_MEMBER_BYTES:
        raise SourceError(
            f"{where}: {member.name!r} has {member.size} bytes, expected at most {MAX_MEMBER_BYTES}; do not trust it"
        )
    file = tar.extractfile(member)
    assert file is not None, "a regular file"
    return file.read()


class _Limited(io.BufferedIOBase):
    """Counts what is unpacked, because a few kilobytes can unpack to terabytes, and reads past the end."""

    def __init__(self, file: gzip.GzipFile, num_bytes: int, where: str) -> None:
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
