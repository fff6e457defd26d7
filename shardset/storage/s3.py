"""Amazon S3, servers that speak as it does (R2, MinIO, Hugging Face buckets), and Azure, behind the
Storage interface.

obstore sends the requests; endpoint, region and credentials come from the environment, by the names
of its settings. It compares no bytes, and takes its own object for another one after a lost answer:
hence the checks here.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar

import obstore
from obstore.exceptions import BaseError, PreconditionError
from obstore.store import AzureStore, S3Store

from shardset.errors import ConfigError, NotFound, PreconditionFailed, StorageError, TransientError
from shardset.per_process import PerProcess
from shardset.storage import base
from shardset.storage.base import ABSENT, ObjectWriter, Stat
from shardset.storage.remote_folder import SpooledWriter
from shardset.storage.retry import kind_of
from shardset.storage.served import Answer, ServedFolder, refuse_compressed

T = TypeVar("T")
Client = S3Store | AzureStore

MAX_BYTES = 5 << 30  # what one request may carry, which the server takes whole or not at all
_PAGE_BYTES = 1 << 21  # of a page of a listing, and all else that obstore receives in one piece
_CRC32C = "crc32c"
_PAGE_SIZE = 1000
_BEYOND = re.compile("status code: 416|Wanted range starting")
_STATUS = re.compile(r"status code: (\d{3})")
# 409: another write goes on
_PASSING = re.compile("SHA256Mismatch|BadDigest|RequestTimeout|status code: (409|416)")
_TAKEN = re.compile("BlobAlreadyExists")  # 409 too, in Azure
_LASTING = re.compile("incorrectly configured region|invalid path|parse path|BlobImmutable")


@dataclass(frozen=True, slots=True)
class S3Storage(ServedFolder):
    """Objects that are written with their CRC32C as metadata. Their ETag is their generation.

    So the same bytes, written again, are the same generation. Whole objects are compared with their
    CRC32C, and raise DamagedObject if they differ twice; objects of other programs have none, and
    listings leave it out. Raises StorageError in a process that was forked from one that has used
    S3: the threads of obstore are missing there.
    """

    scheme: ClassVar[str] = "s3"
    variables: ClassVar[str] = "AWS_"
    advice: ClassVar[str] = "AWS_ENDPOINT_URL, AWS_REGION and the credentials in AWS_..."

    @staticmethod
    def open_client(bucket: str, **options: Any) -> Client:
        """A client of obstore with the settings that the environment has now."""
        config: Any = {"disable_bulk_delete": True}  # which not all servers know
        return S3Store(bucket, config=config, **options)

    @contextmanager
    def request(
        self,
        where: str,
        name: str,
        start: int,
        stop: int | None,
        generation: str | None,
    ) -> Iterator[Answer]:
        full = self._full(name)
        options: Any = {"if_match": generation} if generation else {}
        if start == stop:
            options = {"head": True}
        elif (start, stop) != (0, None):
            options["range"] = {"offset": start} if stop is None else (start, stop)
        with self._said_plainly(where):
            try:
                answer = obstore.get(self._client(MAX_BYTES), full, options=options)
            except BaseError as error:
                if not _BEYOND.search(str(error)):
                    raise
                yield Answer(stat=self.stat(name), first=start, pieces=())
                return
            refuse_compressed(answer.attributes.get("Content-Encoding"), name, where)
            stat = _stat(name, answer.meta, answer.attributes)
            yield Answer(stat=stat, first=answer.range[0], pieces=answer.stream(min_chunk_size=1))

    def _list(self, wanted: str, skip: int) -> Iterator[Stat]:
        folder, last = wanted.rpartition("/")[0] or None, ""
        pages: Iterator[Any] | None = None

        def request() -> list[Any]:
            nonlocal pages
            at = pages or iter(
                obstore.list(
                    self._client(_PAGE_BYTES), folder, offset=last or None, chunk_size=_PAGE_SIZE
                )
            )
            pages = None  # after an error the listing starts again, behind the last name
            page, pages = list(next(at, [])), at
            return page

        while True:
            page = self._ask("", request)
            for meta in page:
                path, seen, last = meta["path"], last, max(last, meta["path"])
                if not path.startswith(wanted):
                    continue
                # obstore calls `x/`, by which consoles draw a folder, `x`; it comes after `x-1` and
                # again after `x`.
                if meta["size"] == 0 and (
                    path <= seen or base.stat_or_none(self, path[skip:]) is None
                ):
                    continue
                if path <= seen:
                    raise StorageError(
                        f"{self.url}: lists {path} after {seen}, expected the order of names"
                    )
                yield _stat(path[skip:], meta, {})
            if len(page) < _PAGE_SIZE:
                return

    def writer(self, name: str, *, if_generation: str | None = None) -> ObjectWriter:
        """Keeps the bytes in memory and sends all at the block's end; raises StorageError above 5
        GiB.
        """
        commit = partial(self._put, name, self._full(name), if_generation)
        return SpooledWriter(commit, f"{self.url}/{name}", max_bytes=MAX_BYTES)

    def _put(self, name: str, full: str, if_generation: str | None, written: SpooledWriter) -> None:
        data, num_bytes, crc32c = written.data(), written.num_bytes, written.crc32c
        mode: Any = {None: "overwrite", ABSENT: "create"}.get(
            if_generation, {"e_tag": if_generation}
        )
        options: Any = {"attributes": {_CRC32C: crc32c}, "mode": mode, "use_multipart": False}
        try:
            client = self._client(num_bytes, is_upload=True)
            e_tag = self._ask(name, lambda: obstore.put(client, full, data, **options))["e_tag"]
        except PreconditionFailed:
            stored = base.stat_or_none(self, name)
            base.accept_identical_object(stored, num_bytes, crc32c, written.where)
            e_tag = stored.generation if stored else None
        # it is encrypted, or damaged
        if e_tag != f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"':
            # another process has replaced or deleted it since
            with suppress(PreconditionFailed, NotFound):
                self.read(name, generation=e_tag)

    def _delete(self, name: str, generation: str | None) -> None:
        """Without a condition: what another process wrote after the look is lost."""
        full = self._full(name)
        with self._said_plainly(f"{self.url}/{name}"):
            obstore.delete(self._client(_PAGE_BYTES), full)

    def _ask(self, name: str, request: Callable[[], T]) -> T:
        """The result of a request, which is sent again until the policy gives up."""
        where = f"{self.url}/{name}"
        return self.persist(where, self._said_plainly(where)(request))

    def _client(self, num_bytes: int, *, is_upload: bool = False) -> Client:
        """This process's client for requests of up to so many bytes, with the settings that the
        environment has now.
        """
        settings = frozenset(
            item for item in os.environ.items() if item[0].startswith(self.variables)
        )
        limits = {
            "connect_timeout": self.retry.connect_timeout_s,
            # Of few different lengths, as each is a client.
            "timeout": self.retry.deadline_of(max(_PAGE_BYTES, 1 << num_bytes.bit_length())),
        }
        if not is_upload:  # which gets no answer while it is sent
            limits["read_timeout"] = self.retry.stall_timeout_s
        return _open_client(type(self), self.bucket, settings, frozenset(limits.items()))

    @contextmanager
    def _said_plainly(self, where: str) -> Iterator[None]:
        """Turns the errors of obstore in the block into ours."""
        try:
            yield
        except (BaseError, FileNotFoundError, ValueError) as error:
            said, status = _said(error), _status(error)
            kind = TransientError if _PASSING.search(said) else kind_of(status or 500)
            # the name, or what it is to be read with
            if _LASTING.search(said) or isinstance(error, ValueError):
                kind = StorageError
            # or gone meanwhile
            elif _TAKEN.search(said) or (status == 404 and isinstance(error, PreconditionError)):
                kind = PreconditionFailed
            advice = "" if issubclass(kind, TransientError) else f"; check the name, {self.advice}"
            raise kind(f"{where}: {said}{advice}") from error


@PerProcess
def _open_client(
    kind: type[S3Storage],
    bucket: str,
    settings: frozenset[tuple[str, str]],
    limits: frozenset[tuple[str, float]],
) -> Client:
    where = f"{kind.scheme}://{bucket}"
    if _open_client.inherited:
        raise StorageError(
            f"{where}: this process was forked after {kind.scheme}:// had been used, and would"
            " hang; start processes by spawn or forkserver (DataLoader:"
            " multiprocessing_context='forkserver')"
        )
    for name, value in settings:
        if "ENDPOINT" in name and "://" not in value:  # a panic in obstore
            raise ConfigError(
                f"{name} is {value}, expected an address such as https://s3.example.com"
            )
    options: Any = {name: timedelta(seconds=limit) for name, limit in limits} | {"allow_http": True}
    try:
        return kind.open_client(bucket, client_options=options, retry_config={"max_retries": 0})
    except BaseError as error:
        raise ConfigError(f"{where}: {_said(error)}; check {kind.advice}") from error


@dataclass(frozen=True, slots=True)
class AzureStorage(S3Storage):
    """Blobs of a container, `az://container/prefix`; the environment names the account.

    ETags of Azure are numbers, so each blob is read back once it is written, and compared with its
    CRC32C.
    """

    scheme: ClassVar[str] = "az"
    variables: ClassVar[str] = "AZURE_"
    advice: ClassVar[str] = "AZURE_STORAGE_ACCOUNT_NAME and the credentials in AZURE_..."

    @staticmethod
    def open_client(bucket: str, **options: Any) -> Client:
        return AzureStore(bucket, **options)

    def _full(self, name: str) -> str:
        if "\\" in name:
            raise ConfigError(
                f"{self.url}/{name}: Azure takes a backslash for a slash; use a name without it"
            )
        return S3Storage._full(self, name)


def _said(error: Exception) -> str:
    return " ".join(str(error).partition("Debug source:")[0].split())[:400]


def _status(error: Exception) -> int:
    match = _STATUS.search(str(error))
    return int(match[1]) if match else 404 if isinstance(error, FileNotFoundError) else 0


def _stat(name: str, meta: Any, attributes: Any) -> Stat:
    generation = meta["e_tag"] or "no ETag"
    if not generation.endswith('"'):  # Azure leaves quotes out of its listings
        generation = f'"{generation}"'
    return Stat(
        name=name, num_bytes=meta["size"], generation=generation, crc32c=attributes.get(_CRC32C)
    )
