"""Amazon S3, servers that speak as it does (R2, MinIO, Hugging Face buckets), and Azure, behind the Storage interface.

obstore sends the requests; endpoint, region and credentials come from the environment, by the names of its settings.
It compares no bytes, and takes its own object for another one after a lost answer: hence the checks here.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar

import obstore
from obstore.exceptions import BaseError, PreconditionError
from obstore.store import AzureStore, S3Store

from shardset.errors import ConfigError, NotFound, PreconditionFailed, StorageError, Throttled, TransientError
from shardset.storage import base
from shardset.storage.base import ABSENT, ObjectWriter, Stat
from shardset.storage.checked import DamagedObject, facts_of, read_twice
from shardset.storage.remote import RemoteFolder, WholeWriter
from shardset.storage.retry import RetryPolicy, persist

T = TypeVar("T")
Client = S3Store | AzureStore

MAX_BYTES = 5 << 30  # what one request may carry, which the server takes whole or not at all
_CRC32C = "crc32c"
_PAGE_SIZE = 1000
_BEYOND = re.compile("status code: 416|Wanted range starting")
_STATUS = re.compile(r"status code: (\d{3})")
_PASSING = re.compile("SHA256Mismatch|BadDigest|RequestTimeout")
_TAKEN = re.compile("BlobAlreadyExists")  # 409 too, in Azure
_LASTING = re.compile("incorrectly configured region|invalid path|parse path")
_REFUSALS: dict[int, type[StorageError]] = (
    dict.fromkeys(range(300, 500), StorageError)
    | dict.fromkeys((408, 409, 416), TransientError)  # 409: another write of the object is under way
    | {404: NotFound, 412: PreconditionFailed, 429: Throttled, 503: Throttled}
)


@dataclass(frozen=True, slots=True)
class S3Storage(RemoteFolder):
    """Objects that are written with their CRC32C as metadata. Their ETag is their generation.

    So the same bytes, written again, are the same generation. Whole objects are compared with their CRC32C, and raise
    DamagedObject if they differ twice; objects of other programs have none, and listings leave it out. Raises
    StorageError in a process that was forked from one that has used S3: the threads of obstore are missing there.
    """

    scheme: ClassVar[str] = "s3"
    variables: ClassVar[str] = "AWS_"
    advice: ClassVar[str] = "AWS_ENDPOINT_URL, AWS_REGION and the credentials in AWS_..."

    @staticmethod
    def open_client(bucket: str, **options: Any) -> Client:
        """A client of obstore with the settings that the environment has now."""
        config: Any = {"disable_bulk_delete": True}  # which not all servers know
        return S3Store(bucket, config=config, **options)

    def _read(self, name: str, start: int, stop: int | None, generation: str | None) -> tuple[bytes, Stat]:
        full, where = self._full(name), f"{self.url}/{name}"
        head: Any = {"head": True}
        options: Any = {"if_match": generation} if generation else {}
        if stop is not None and stop <= start:
            options = head  # no range asks for zero bytes
        elif (start, stop) != (0, None):
            options["range"] = {"offset": start} if stop is None else (start, stop)

        def request(store: Client) -> tuple[bytes, Stat]:
            try:
                answer = obstore.get(store, full, options=options)
            except BaseError as error:
                if not _BEYOND.search(str(error)):
                    raise
                answer = obstore.get(store, full, options=head)
            stat = _stat(name, answer.meta, answer.attributes)
            base.check_generation(stat.generation, generation, where)
            num_bytes = base.check_range(start, stop, stat.num_bytes, where) - start
            data = answer.bytes().to_bytes() if num_bytes else b""
            if len(data) != num_bytes:
                raise TransientError(f"{where}: {len(data)} bytes from {start} on arrived, expected {num_bytes}")
            return data, stat

        def fits(found: tuple[bytes, Stat]) -> bool:
            data, stat = found
            return len(data) < stat.num_bytes or stat.crc32c in (None, facts_of(data)[1])

        data, stat = read_twice(lambda: self._ask(name, request), fits)
        if not fits((data, stat)):
            raise DamagedObject(f"{where}: has not the CRC32C it was written with, {stat.crc32c}; replace it", data)
        return data, stat

    def _list(self, wanted: str, skip: int) -> Iterator[Stat]:
        folder, last = wanted.rpartition("/")[0] or None, ""
        pages: Iterator[Any] | None = None

        def request(store: Client) -> list[Any]:
            nonlocal pages
            at = pages or iter(obstore.list(store, folder, offset=last or None, chunk_size=_PAGE_SIZE))
            pages = None  # after an error the listing begins anew, behind the last name
            page, pages = list(next(at, [])), at
            return page

        while True:
            page = self._ask("", request)
            for meta in page:
                path, seen, last = meta["path"], last, max(last, meta["path"])
                if not path.startswith(wanted):
                    continue
                # obstore calls `x/`, by which consoles draw a folder, `x`; it comes after `x-1` and again after `x`.
                if meta["size"] == 0 and (path <= seen or base.stat_or_none(self, path[skip:]) is None):
                    continue
                if path <= seen:
                    raise StorageError(f"{self.url}: lists {path} after {seen}, expected the order of names")
                yield _stat(path[skip:], meta, {})
            if len(page) < _PAGE_SIZE:
                return

    def writer(self, name: str, *, if_generation: str | None = None) -> ObjectWriter:
        """Keeps the bytes in memory and sends all at the block's end; raises StorageError above 5 GiB."""
        return WholeWriter(partial(self._put, name, self._full(name), if_generation), f"{self.url}/{name}", MAX_BYTES)

    def _put(self, name: str, full: str, if_generation: str | None, data: bytes) -> None:
        where, (num_bytes, crc32c) = f"{self.url}/{name}", facts_of(data)
        mode: Any = {None: "overwrite", ABSENT: "create"}.get(if_generation, {"e_tag": if_generation})
        options: Any = {"attributes": {_CRC32C: crc32c}, "mode": mode, "use_multipart": False}
        try:
            e_tag = self._ask(name, lambda store: obstore.put(store, full, data, **options), is_upload=True)["e_tag"]
        except PreconditionFailed:
            stored = base.stat_or_none(self, name)
            base.accept_identical_object(stored, num_bytes, crc32c, where)
            e_tag = stored.generation if stored else None
        if e_tag != f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"':  # it is encrypted, or damaged
            with suppress(PreconditionFailed, NotFound):  # another process has replaced or deleted it since
                self.read(name, generation=e_tag)

    def delete(self, name: str, *, generation: str | None = None) -> None:
        """With a generation: looks, then deletes. What another process writes between these two requests is lost."""
        full = self._full(name)
        with suppress(NotFound):
            if generation is None or generation == self.stat(name).generation:
                self._ask(name, lambda store: obstore.delete(store, full))

    def _ask(self, name: str, request: Callable[[Client], T], *, is_upload: bool = False) -> T:
        """The result of a request, which is sent again until the policy gives up."""

        def attempt() -> T:
            try:
                return request(_client(type(self), self.bucket, self.retry, is_upload))
            except (BaseError, FileNotFoundError, ValueError) as error:
                raise _refusal(error, f"{self.url}/{name}", self.advice) from error

        return persist(self.retry, f"{self.url}/{name}", attempt)


@dataclass(frozen=True, slots=True)
class AzureStorage(S3Storage):
    """Blobs of a container, `az://container/prefix`; the environment names the account.

    ETags of Azure are numbers, so each blob is read back once it is written, and compared with its CRC32C.
    """

    scheme: ClassVar[str] = "az"
    variables: ClassVar[str] = "AZURE_"
    advice: ClassVar[str] = "AZURE_STORAGE_ACCOUNT_NAME and the credentials in AZURE_..."

    @staticmethod
    def open_client(bucket: str, **options: Any) -> Client:
        return AzureStore(bucket, **options)

    def _full(self, name: str) -> str:
        if "\\" in name:
            raise ConfigError(f"{self.url}/{name}: Azure takes a backslash for a slash; use a name without it")
        return base.join(self.prefix, base.check_name(name, self.url))


_clients: dict[tuple[Any, ...], Client] = {}


def _client(kind: type[S3Storage], bucket: str, policy: RetryPolicy, is_upload: bool) -> Client:
    """This process's client for a bucket or container, with the settings that the environment has now."""
    settings = frozenset(item for item in os.environ.items() if item[0].startswith(kind.variables))
    key = (os.getpid(), kind, bucket, is_upload, policy.connect_timeout_s, policy.stall_timeout_s, settings)
    if key in _clients:
        return _clients[key]
    if any(pid != key[0] for pid, *_ in list(_clients)):  # a list, as threads add to it
        raise StorageError(
            f"{kind.scheme}://{bucket}: this process was forked after {kind.scheme}:// had been used, and would hang; "
            "start processes by spawn or forkserver (DataLoader: multiprocessing_context='forkserver')"
        )
    for name, value in settings:
        if "ENDPOINT" in name and "://" not in value:  # a panic in obstore
            raise ConfigError(f"{name} is {value}, expected an address such as https://s3.example.com")
    limits = {"connect_timeout": policy.connect_timeout_s, "read_timeout": policy.stall_timeout_s, "timeout": 3600.0}
    if is_upload:  # which gets no answer while it is sent
        del limits["read_timeout"]
    options: Any = {name: timedelta(seconds=limit) for name, limit in limits.items()} | {"allow_http": True}
    try:
        _clients[key] = kind.open_client(bucket, client_options=options, retry_config={"max_retries": 0})
    except BaseError as error:
        raise ConfigError(f"{kind.scheme}://{bucket}: {_said(error)}; check {kind.advice}") from error
    return _clients[key]


def _refusal(error: Exception, where: str, advice: str) -> StorageError:
    """An error of obstore as one of ours."""
    said, status = _said(error), _status(error)
    kind = TransientError if _PASSING.search(said) else _REFUSALS.get(status, TransientError)
    if _LASTING.search(said):
        kind = StorageError
    elif _TAKEN.search(said) or (status == 404 and isinstance(error, PreconditionError)):  # or gone meanwhile
        kind = PreconditionFailed
    return kind(f"{where}: {said}; check the name, {advice}")


def _said(error: Exception) -> str:
    return " ".join(str(error).partition("Debug source:")[0].split())[:400]


def _status(error: Exception) -> int:
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 404 if isinstance(error, FileNotFoundError) else 0


def _stat(name: str, meta: Any, attributes: Any) -> Stat:
    generation = meta["e_tag"] or "no ETag"
    if not generation.endswith('"'):  # Azure leaves quotes out of its listings
        generation = f'"{generation}"'
    return Stat(name=name, num_bytes=meta["size"], generation=generation, crc32c=attributes.get(_CRC32C))
