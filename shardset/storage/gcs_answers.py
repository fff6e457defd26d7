"""The JSON answers of Cloud Storage that are asked for: an object, a page of a listing, a bucket."""

from typing import Annotated, Literal

import msgspec

from shardset.checksum import crc32c_text
from shardset.prepared import prepared
from shardset.storage.base import Stat

_CRC32C_OF_NOTHING = crc32c_text(0)


@prepared
class ListedObject(msgspec.Struct, frozen=True):
    """An object in a listing. A server may leave out the size of an empty object."""

    name: str
    generation: int
    size: Annotated[int, msgspec.Meta(ge=0)] | None = None
    crc32c: str | None = None

    def __post_init__(self) -> None:
        if self.size is None and self.crc32c not in (None, _CRC32C_OF_NOTHING):
            raise ValueError(f"no size, though the CRC32C {self.crc32c} is not that of zero bytes")

    def stat(self, name: str) -> Stat:
        """The object as a Stat; `name` is its name in the folder."""
        return Stat(name=name, num_bytes=self.size or 0, generation=str(self.generation), crc32c=self.crc32c)


@prepared
class StoredObject(ListedObject, frozen=True, kw_only=True):
    kind: Literal["storage#object"]


@prepared
class ListingPage(msgspec.Struct, frozen=True, rename="camel"):
    kind: Literal["storage#objects"]
    items: list[ListedObject] = []
    next_page_token: str = ""


class _PlacementConfig(msgspec.Struct, frozen=True, rename="camel"):
    data_locations: list[str] = []


@prepared
class BucketFacts(msgspec.Struct, frozen=True, rename="camel"):
    kind: Literal["storage#bucket"]
    location: str = "unknown"
    custom_placement_config: _PlacementConfig = _PlacementConfig()
