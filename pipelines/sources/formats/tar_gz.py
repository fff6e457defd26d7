"""Reads small named members of a .tar.gz.

The first pass reads the whole archive, so that its checksum covers what is used. Later passes read one member, compare
it with its own checksum, and stop behind it. Neither trusts a size: a few kilobytes can unpack to terabytes.

`igzip` is the standard library's GzipFile over ISA-L, which unpacks in 0.5 to 0.6 of zlib's time: every worker unpacks
the archive up to its batch.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple, cast

from isal import igzip, isal_zlib

from pipelines.sources.formats import tar
from shardset.checksum import crc32c_of
from shardset.errors import SourceError

MAX_BYTES = 512 << 20
"""What an archive may unpack to: more than any published one does."""

_CHUNK_BYTES = 1 << 20
_GzipFile: Any = igzip.GzipFile  # isal does not type its methods
_BROKEN = (igzip.BadGzipFile, cast(type[Exception], isal_zlib.error), EOFError)
"""What igzip raises for bytes that are truncated or damaged."""


class ArchiveMember(NamedTuple):
    """A regular file in an archive: its offset in the unpacked tar, its size, its CRC32C."""

    offset: int
    num_bytes: int
    crc32c: int


def read_members(
    file: IO[bytes], where: str, *, names: Collection[str], contents_of: Collection[str], max_bytes: int = MAX_BYTES
) -> tuple[dict[str, ArchiveMember], dict[str, bytes]]:
    """The regular files of these base names in an archive, and the contents of some; missing ones are left out.

    Ignores folders, links and special files. Raises SourceError if the archive is truncated or damaged, unpacks to more
    than `max_bytes`, or holds one of the names twice.
    """
    members: dict[str, ArchiveMember] = {}
    contents: dict[str, bytes] = {}
    with _unpacked(file, where) as unpacked:
        for info in tar.walk(unpacked, f"{where}: unpacked to at most {max_bytes} bytes", 0, max_bytes):
            name = info.name.rpartition("/")[2]
            if name not in names or not info.isreg() or info.issparse():
                continue
            if name in members:
                raise SourceError(f"{where}: holds {name} twice, expected it once; download the published archive")
            content = tar.read_member(unpacked, info)
            members[name] = ArchiveMember(info.offset_data, info.size, crc32c_of(content))
            if name in contents_of:
                contents[name] = content
        if unpacked.read(1):  # the walk read to the end, whose checksum igzip has compared, or to the limit
            raise SourceError(f"{where}: unpacks to more than {max_bytes} bytes; download the published archive")
    return members, contents


def read_member(file: IO[bytes], where: str, member: ArchiveMember) -> bytes:
    """The content of a member that `read_members` gave, without unpacking what is behind it.

    Raises SourceError if the content has changed.
    """
    with _unpacked(file, where) as unpacked:
        for start in range(0, member.offset, _CHUNK_BYTES):
            unpacked.read(min(_CHUNK_BYTES, member.offset - start))
        content: bytes = unpacked.read(member.num_bytes)
    if crc32c_of(content) != member.crc32c:
        raise SourceError(f"{where}: its CRC32C is another one than when the archive was surveyed; download it again")
    return content


@contextmanager
def _unpacked(file: IO[bytes], where: str) -> Iterator[Any]:
    try:
        with _GzipFile(fileobj=file) as unpacked:
            yield unpacked
    except _BROKEN as error:
        raise SourceError(
            f"{where}: cut or damaged, expected a whole .tar.gz ({type(error).__name__}: {error}); download it again"
        ) from error
