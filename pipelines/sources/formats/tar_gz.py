"""Reads small named members of a .tar.gz.

The first pass reads the whole archive, so that its checksum covers what is used. Later passes read one member, compare
it with its own checksum, and stop behind it. Neither trusts a size: a few kilobytes can unpack to terabytes.

`igzip` is the standard library's GzipFile over ISA-L, which unpacks in 0.5 to 0.6 of zlib's time: every worker unpacks
the archive up to its batch.
"""

import tarfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

import google_crc32c
from isal import igzip, isal_zlib

from pipelines.sources.formats.tar import MAX_HEADER_BYTES
from shardset.errors import SourceError

_CHUNK_BYTES = 1 << 20
_GzipFile: Any = igzip.GzipFile  # isal does not type its methods

_BROKEN: tuple[type[Exception], ...] = (
    tarfile.TarError,
    igzip.BadGzipFile,
    cast(type[Exception], isal_zlib.error),
    EOFError,
    OverflowError,
    RecursionError,
    ValueError,
)
"""What igzip and tarfile raise for bytes that are truncated, damaged or malicious."""


@dataclass(frozen=True, slots=True)
class UnpackLimits:
    """How many bytes an archive, and a member that is kept in memory, may unpack to."""

    archive_bytes: int = 512 << 20
    member_bytes: int = 256 << 20


PUBLISHED_LIMITS = UnpackLimits()
"""Larger than anything in a published archive."""


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A regular file in an archive: its offset in the unpacked tar, its size, its CRC32C."""

    offset: int
    num_bytes: int
    crc32c: int


def read_members(
    file: IO[bytes],
    where: str,
    *,
    names: Collection[str],
    contents_of: Collection[str],
    limits: UnpackLimits = PUBLISHED_LIMITS,
) -> tuple[dict[str, ArchiveMember], dict[str, bytes]]:
    """The regular files of these base names in an archive, and the contents of some; missing ones are left out.

    Ignores folders, links and special files. Raises SourceError if the archive is truncated or damaged, unpacks beyond
    the limits, or holds one of the names twice.
    """
    try:
        with _GzipFile(fileobj=file) as unzipped:
            unpacked = _Unpacked(unzipped, limits.archive_bytes, where)
            members = _walk(unpacked, where, names, contents_of, limits)
            while unpacked.take(_CHUNK_BYTES):
                pass  # the checksum of the archive is behind its last byte
    except _BROKEN as error:
        raise _damaged(where, error) from error
    return members


def read_member(file: IO[bytes], where: str, member: ArchiveMember, limits: UnpackLimits = PUBLISHED_LIMITS) -> bytes:
    """The content of a member that `read_members` gave, without unpacking what is behind it.

    Raises SourceError if the content has changed.
    """
    _check_size(member.num_bytes, where, limits)
    try:
        with _GzipFile(fileobj=file) as unzipped:
            for start in range(0, member.offset, _CHUNK_BYTES):
                unzipped.read(min(_CHUNK_BYTES, member.offset - start))
            content: bytes = unzipped.read(member.num_bytes)
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
    file: "_Unpacked", where: str, names: Collection[str], contents_of: Collection[str], limits: UnpackLimits
) -> tuple[dict[str, ArchiveMember], dict[str, bytes]]:
    members: dict[str, ArchiveMember] = {}
    contents: dict[str, bytes] = {}
    for member in _members(file):
        name = member.name.rpartition("/")[2]
        if name not in names or not _is_plain(member):
            continue
        if name in members:
            raise SourceError(f"{where}: holds {name} twice, expected it once; download the published archive")
        if name in contents_of:
            _check_size(member.size, f"{where}: {member.name!r}", limits)
        crc, kept = 0, []
        for piece in _pieces(file, member):
            crc = google_crc32c.extend(crc, piece)
            if name in contents_of:
                kept.append(piece)
        members[name] = ArchiveMember(member.offset_data, member.size, crc)
        if name in contents_of:
            contents[name] = b"".join(kept)
    return members, contents


def _members(file: "_Unpacked") -> Iterator[tarfile.TarInfo]:
    """The members of a tar; between two of them the caller may read the content of the first from `file`."""
    tar = tarfile.TarFile(fileobj=cast(IO[bytes], file), mode="r")
    while (member := tar.next()) is not None:
        yield member
        file.allowance = MAX_HEADER_BYTES
        # tarfile keeps every member it has seen; a million of them are a gigabyte.
        tar.members = []  # type: ignore[attr-defined]


def _is_plain(member: tarfile.TarInfo) -> bool:
    return member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()


def _check_size(num_bytes: int, where: str, limits: UnpackLimits) -> None:
    if num_bytes > limits.member_bytes:
        raise SourceError(f"{where} has {num_bytes} bytes, expected at most {limits.member_bytes}; do not trust it")


def _pieces(file: "_Unpacked", member: tarfile.TarInfo) -> Iterator[bytes]:
    left = member.size
    while left > 0:
        piece = file.take(min(_CHUNK_BYTES, left))
        if not piece:
            raise EOFError("unexpected end of data")
        left -= len(piece)
        yield piece


class _Unpacked:
    """The unpacked bytes of a gzip file, forward only, for tarfile; raises SourceError beyond `num_bytes` of them.

    tarfile reads headers with `read`, which has an allowance: tarfile believes the size that an extension header
    states, and reads that much into memory.
    """

    mode = "rb"

    def __init__(self, file: igzip.GzipFile, num_bytes: int, where: str) -> None:
        self._file, self._max_bytes, self._left, self._where = file, num_bytes, num_bytes, where
        self._position, self.allowance = 0, MAX_HEADER_BYTES

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        if position < self._position:
            raise ValueError(f"a member of a negative size before byte {self._position}")
        while self._position < position:
            if not self.take(min(_CHUNK_BYTES, position - self._position)):
                raise EOFError("a member claims more bytes than there are")

    def read(self, num_bytes: int) -> bytes:
        self.allowance -= num_bytes
        if self.allowance < 0:
            raise ValueError(f"its extension headers are longer than {MAX_HEADER_BYTES} bytes")
        return self.take(num_bytes)

    def take(self, num_bytes: int) -> bytes:
        """The next bytes, of headers or contents."""
        data = self._file.read(num_bytes)
        self._position += len(data)
        self._left -= len(data)
        if self._left < 0:
            raise SourceError(
                f"{self._where}: unpacks to more than {self._max_bytes} bytes, far more than a published archive; "
                "do not trust it"
            )
        return data
