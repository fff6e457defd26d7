"""Small tars as other programs write them."""

import io
import tarfile
from collections.abc import Iterable, Mapping


def tar_bytes(
    files: Mapping[str, bytes] | Iterable[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT
) -> bytes:
    """A tar of plain files in the given order; pairs allow a name to come twice."""
    pairs = files.items() if isinstance(files, Mapping) else files
    return tar_of(((plain(name, content), content) for name, content in pairs), format)


def tar_of(
    members: Iterable[tuple[tarfile.TarInfo, bytes]], format: int = tarfile.USTAR_FORMAT
) -> bytes:
    """A tar of the given members, which may be links, devices or badly named."""
    buffer = io.BytesIO()
    with tarfile.TarFile(fileobj=buffer, mode="w", format=format) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def plain(name: str, content: bytes) -> tarfile.TarInfo:
    """The header of a regular file."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info


def special(name: str, type: bytes, linkname: str = "") -> tarfile.TarInfo:
    """The header of a link, a device or a folder."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = type, linkname
    return info


def content_offset(tar: bytes, name: str) -> int:
    """Where the content of a member starts."""
    with tarfile.TarFile(fileobj=io.BytesIO(tar)) as archive:
        return archive.getmember(name).offset_data
