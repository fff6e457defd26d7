"""Downloads one published file: resumable, and kept only if its MD5 is the published one."""

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path

from shardset.errors import SourceError, TransientError

CHUNK = 1 << 20


def download(url: str, path: Path, md5: str) -> Path:
    """`path`, holding the file at `url`; an unfinished download beside it is continued.

    Raises TransientError if the connection failed (run again to continue), SourceError if what came
    has another MD5 (it is deleted).
    """
    if path.exists():
        return path
    part = path.with_name(path.name + ".part")
    try:
        _continue(url, part)
    except (
        urllib.error.URLError,
        http.client.HTTPException,
        ConnectionError,
        TimeoutError,
    ) as error:
        have = part.stat().st_size if part.exists() else 0
        raise TransientError(
            f"{url}: {error} after {have} bytes; run it again to resume from there"
        ) from error
    found = _md5(part)
    if found != md5:
        part.unlink()
        raise SourceError(
            f"{url}: MD5 is {found}, published is {md5}; the download was deleted, run it again"
        )
    os.replace(part, path)
    return path


def _continue(url: str, part: Path) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is left to fetch; the checksum decides
            return
        raise
    with response, part.open("ab" if response.status == 206 else "wb") as out:
        total = _total(response, have)
        have = out.tell()
        while data := response.read(CHUNK):
            out.write(data)
            have += len(data)
            print(f"\r{url}: {have / 1e6:,.0f} of {total / 1e6:,.0f} MB", end="", flush=True)
    print()
    if have < total:
        raise ConnectionError(f"the connection ended at byte {have} of {total}")


def _total(response: http.client.HTTPResponse, have: int) -> int:
    return int(response.headers.get("Content-Length", 0)) + (have if response.status == 206 else 0)


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
