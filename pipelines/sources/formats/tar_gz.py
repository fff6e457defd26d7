"""Reads small named members of a .tar.gz.

An archive that is read to its end has been compared with its checksum. No size in it is trusted: a few kilobytes can
unpack to terabytes.

`igzip` is the standard library's GzipFile over ISA-L, which unpacks in 0.5 to 0.6 of zlib's time: every worker unpacks
the archive up to its batch.
"""

from collections.abc import Collection
from typing import IO, Any, cast

from isal import igzip, isal_zlib

from pipelines.sources.formats import tar
from shardset.errors import SourceError

MAX_BYTES = 512 << 20
"""What an archive may unpack to: more than any published one does."""

_GzipFile: Any = igzip.GzipFile  # isal does not type its methods
_BROKEN = (igzip.BadGzipFile, cast(type[Exception], isal_zlib.error), EOFError)
"""What igzip raises for bytes that are truncated or damaged."""


def read_members(
    file: IO[bytes], where: str, names: Collection[str], *, to_end: bool = True, max_bytes: int = MAX_BYTES
) -> dict[str, bytes]:
    """The contents of the regular files of these base names in an archive; missing ones are left out.

    Ignores folders, links and special files. Raises SourceError if the archive is truncated or damaged, unpacks to more
    than `max_bytes`, or holds one of the names twice. Without `to_end` it stops behind the last of the names, so what
    it has read is not compared with the checksum of the archive.
    """
    contents: dict[str, bytes] = {}
    try:
        with _GzipFile(fileobj=file) as unpacked:
            for info in tar.walk(unpacked, f"{where}: unpacked to at most {max_bytes} bytes", 0, max_bytes):
                name = info.name.rpartition("/")[2]
                if name not in names or not info.isreg() or info.issparse():
                    continue
                if name in contents:
                    raise SourceError(f"{where}: holds {name} twice, expected it once; download the published archive")
                contents[name] = tar.read_member(unpacked, info)
                if not to_end and len(contents) == len(names):
                    return contents
            if unpacked.read(1):  # the walk read to the end, whose checksum igzip has compared, or to the limit
                raise SourceError(f"{where}: unpacks to more than {max_bytes} bytes; download the published archive")
    except _BROKEN as error:
        raise SourceError(
            f"{where}: cut or damaged, expected a whole .tar.gz ({type(error).__name__}: {error}); download it again"
        ) from error
    return contents
