"""Spools for tests of sources."""

from pipelines.sources.base import SPOOL, Extent


class MemorySpool:
    """Keeps what it is given; `content(extent)` gives it back."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, content: bytes) -> Extent:
        """Where the bytes stand in `data`."""
        extent = Extent(SPOOL, "", len(self.data), len(content))
        self.data += content
        return extent

    def content(self, extent: Extent) -> bytes:
        """The bytes of an extent of this spool."""
        return bytes(self.data[extent.offset : extent.offset + extent.num_bytes])
