"""Where bytes live: local disk, gs:// and memory behind one interface. The only import of google-cloud-storage."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """What is known of a stored object without reading it.

    `generation` changes whenever the content is replaced. `crc32c` is base64 as GCS reports it; None where
    the storage does not keep one (local disk).
    """

    name: str
    num_bytes: int
    generation: str
    crc32c: str | None


class Writer(Protocol):
    """Bytes on their way to one object: nothing is visible until the `with` block ends without an exception.

    Leaving the block by an exception aborts: no object, no temporary left.
    """

    def __enter__(self) -> "Writer": ...
    def __exit__(self, *exc: object) -> None: ...
    def write(self, data: bytes | memoryview) -> None: ...


class Storage(Protocol):
    """A folder of objects. Names are relative, use `/`, and can't leave the folder (ConfigError).

    Instances pickle (clients and file handles are opened where they are used) and are safe to share by threads.
    """

    @property
    def url(self) -> str:
        """The folder as a user would type it, without a trailing slash."""
        ...

    def stat(self, name: str) -> Stat:
        """Raises NotFound."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None) -> bytes:
        """The bytes [start, stop) of an object, all of them; TransientError if they came short after retries.

        With `generation`, raises PreconditionFailed or NotFound if the object is not that one any more.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """Objects whose names start with `prefix`, in name order (UTF-8 bytes), recursively. No temporaries."""
        ...

    def writer(self, name: str, *, if_generation: str | None = None) -> Writer:
        """Creates or replaces an object atomically. With `if_generation=ABSENT`, only if nothing stands there.

        Raises PreconditionFailed when the block ends if something else stands there; if what stands there has
        the same size and CRC32C, that is success: a lost response or a twin worker wrote the same bytes.
        """
        ...

    def delete(self, name: str) -> None:
        """Removes an object; one that is not there is no error."""
        ...


ABSENT = "0"


def open_storage(url: str) -> Storage:
    """The storage of a folder: a local path, `gs://bucket/prefix` or `memory://name/prefix`."""
    raise ValueError(url)


def open_file(url: str) -> tuple[Storage, str]:
    """The storage of the folder that holds the object at `url`, and its name there."""
    folder, _, name = url.rpartition("/")
    return open_storage(folder or ("/" if url.startswith("/") else ".")), name
