"""What storages of remote folders share: names, reads, deletions, retries and their pace.

And a writer that keeps an object whole."""

import io
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Self, TypeVar

from shardset.errors import ConfigError, NotFound, PreconditionFailed, StorageError, TransientError
from shardset.storage.base import (
    ObjectWriter,
    Stat,
    Storage,
    check_generation,
    check_name,
    check_prefix,
    check_range,
    join,
    stat_or_none,
)
from shardset.storage.checked import read_twice
from shardset.storage.download import Answer, Download
from shardset.storage.retry import RetryPolicy, Throttle, persist, policy_of_process

T = TypeVar("T")

_throttles: dict[tuple[object, ...], Throttle] = {}


@dataclass(frozen=True, slots=True)
class RemoteFolder(Storage):
    """Objects of a bucket below a prefix; a class for each `scheme` of addresses."""

    bucket: str
    prefix: str = ""
    retry: RetryPolicy = field(default_factory=policy_of_process)

    scheme: ClassVar[str]
    is_remote: ClassVar[bool] = True
    is_shared: ClassVar[bool] = True
    reads_at_once: ClassVar[int] = 16

    def __post_init__(self) -> None:
        if self.prefix:
            check_name(self.prefix, f"{self.scheme}://{self.bucket}")

    @property
    def url(self) -> str:
        """`scheme://bucket/prefix`."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    def stat(self, name: str) -> Stat:
        return self._read(name, 0, 0, None)[1]

    def read(self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None) -> bytes:
        return self._read(name, start, stop, generation)[0]

    def read_with_stat(self, name: str, start: int = 0, stop: int | None = None) -> tuple[bytes, Stat]:
        return self._read(name, start, stop, None)

    def list(self, prefix: str = "") -> Iterator[Stat]:
        return self._list(join(self.prefix, check_prefix(prefix, self.url)), len(join(self.prefix, "")))

    def on_retry(self, tell: Callable[[], None]) -> Self:
        return replace(self, retry=replace(self.retry, on_pause=tell))

    def _full(self, name: str) -> str:
        return full_name(self.prefix, name, self.url)

    @abstractmethod
    def _read(self, name: str, start: int, stop: int | None, generation: str | None) -> tuple[bytes, Stat]:
        """The bytes [start, stop) and the facts, as `read` and `read_with_stat` promise."""

    @abstractmethod
    def _list(self, wanted: str, skip: int) -> Iterator[Stat]:
        """Objects of the bucket whose names start with `wanted`, each without its first `skip` characters."""


@dataclass(frozen=True, slots=True)
class ServedFolder(RemoteFolder):
    """A folder of a server, which may refuse, break off or drip: one throttle, retry and deadline.

    The variable `endpoint` of the environment names another server than the usual one.
    """

    endpoint: ClassVar[str] = ""

    @property
    def is_throttled(self) -> bool:
        return self._throttle(is_range=True).is_busy(self.retry)

    def stat(self, name: str) -> Stat:
        def attempt() -> Stat:
            with self._request(name, 0, 0, None) as answer:
                return answer.stat

        return self.persist(f"{self.url}/{name}", attempt)

    def delete(self, name: str, *, generation: str | None = None) -> None:
        """After any answer but a success, the object must be gone."""
        where = f"{self.url}/{name}"

        def attempt() -> None:
            try:
                answer = self._delete(name, generation)
            except (NotFound, PreconditionFailed) as error:
                answer = str(error).removeprefix(f"{where}: ")
            if answer and self._holds(name, generation):
                raise TransientError(f"{where}: it is still stored after its deletion was answered with: {answer}")

        if generation is None or self._holds(name, generation):  # a server may not know the condition
            self.persist(where, attempt)

    def _holds(self, name: str, generation: str | None) -> bool:
        stored = read_twice(partial(stat_or_none, self, name), lambda stat: stat is not None)
        return stored is not None and generation in (None, stored.generation)

    def _read(self, name: str, start: int, stop: int | None, generation: str | None) -> tuple[bytes, Stat]:
        return self._download(name, start, stop, generation)

    def _download(self, name: str, start: int, stop: int | None, generation: str | None) -> tuple[bytes, Stat]:
        where, throttle = f"{self.url}/{name}", self._throttle(is_range=(start, stop) != (0, None))
        if stop is not None and stop <= start:  # no request asks for zero bytes
            stat = self.stat(name)
            check_generation(stat.generation, generation, where)
            check_range(start, stop, stat.num_bytes, where)
            return b"", stat
        download = Download(
            policy=self.retry,
            where=span(where, start, stop),
            request=partial(self._request, name),
            stat=partial(self.stat, name),
            start=start,
            stop=stop,
            generation=generation,
        )
        return persist(self.retry, where, download.attempt, lambda: download.farthest, throttle), download.found

    def persist(self, where: str, attempt: Callable[[], T]) -> T:
        """The result of `attempt`, at the bucket's pace, repeated until the policy gives up."""
        return persist(self.retry, where, attempt, throttle=self._throttle(is_range=False))

    def _throttle(self, *, is_range: bool) -> Throttle:
        """This process's throttle of a bucket; byte ranges have another, or a heartbeat would queue."""
        key = os.getpid(), self.scheme, os.environ.get(self.endpoint), self.bucket, is_range
        return _throttles.get(key) or _throttles.setdefault(key, Throttle())

    @abstractmethod
    def _request(
        self, name: str, start: int, stop: int | None, generation: str | None
    ) -> AbstractContextManager[Answer]:
        """One answer to a request for the bytes [start, stop); without bytes if there are none.

        Raises TransientError if another try may help, in the block too.
        """

    @abstractmethod
    def _delete(self, name: str, generation: str | None) -> str:
        """Asks once for a deletion; returns the answer if that does not confirm it, else ""."""


def full_name(prefix: str, name: str, url: str) -> str:
    """The name of an object in its bucket; raises ConfigError for one that can't be there."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{url}: {name!r} is not UTF-8, as names here are; rename it") from None
    return join(prefix, check_name(name, url))


def span(where: str, start: int, stop: int | None) -> str:
    """An object and the bytes of it that are asked for, as messages name them."""
    return where if (start, stop) == (0, None) else f"{where} bytes {start} to {stop or 'the end'}"


class WholeWriter:
    """Keeps the bytes in memory, and gives them to `commit` at the end of the block; StorageError above `max_bytes`."""

    def __init__(self, commit: Callable[[bytes], None], where: str, max_bytes: float = math.inf) -> None:
        self._commit, self._where, self._max_bytes, self._file = commit, where, max_bytes, io.BytesIO()

    def __enter__(self) -> ObjectWriter:
        return self

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        if self._file.tell() > self._max_bytes:
            raise StorageError(f"{self._where}: more than the {self._max_bytes} bytes that one request can carry")

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self._commit(self._file.getvalue())
