"""How keys and the paths of shards, indexes and manifests are spelled.

All paths are relative to the folder of the manifest and use `/`.
"""

import re

from shardset.order.permutation import hash_text

MANIFEST = "manifest.json"
REPORT = "report.html"
PLAN_FOLDER = "plan/"
VERSIONS_FOLDER = "versions/"
COLUMNS_FOLDER = "columns/"
SPLIT_NAMES = (
    "letters, digits, - and _, at most 40; plan, versions and columns are folders of the set itself"
)
"""What `is_split` accepts, for messages."""

MAX_KEY_BYTES = 72
MAX_FIELD_BYTES = 16
"""With a dot and an `@COPY` of 11 bytes they fill the 100 bytes of a name in a USTAR header."""

_KEY = re.compile(r"[A-Za-z0-9_+=-]+(/[A-Za-z0-9_+=-]+)*", re.ASCII)
_SKIPPED = re.compile(r"__[^/]*__/")  # webdataset takes such names for metadata and skips them
_FIELD = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.ASCII)
_MEMBER = re.compile(rf"({_KEY.pattern})(@[1-9][0-9]*)?\.({_FIELD.pattern})", re.ASCII)
_SPLIT = re.compile(r"[A-Za-z0-9_-]{1,40}", re.ASCII)
_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"


def is_key(key: str) -> bool:
    """Whether a raw sample can have the key `key`: ASCII letters, digits and `_+=-/`, at most 72
    bytes.

    No dot (a key ends at the first), no space, no empty part; `@` is reserved for copies of a
    sample. The first folder must not be called `__...__`.
    """
    return len(key) <= MAX_KEY_BYTES and _KEY.fullmatch(key) is not None and not _SKIPPED.match(key)


def is_field(field: str) -> bool:
    """Whether `field` can be a member's extension: lower-case ASCII, at most 16 bytes, inner dots
    allowed.
    """
    return len(field) <= MAX_FIELD_BYTES and _FIELD.fullmatch(field) is not None


def is_member(name: str) -> bool:
    """Whether a tar member of ours can be called `name`: `KEY.FIELD` or `KEY@COPY.FIELD`."""
    return _MEMBER.fullmatch(name) is not None


def is_split(split: str) -> bool:
    """Whether `split` can name a split and its folder, which is none of the set's other folders."""
    return _SPLIT.fullmatch(split) is not None and f"{split}/" not in (
        PLAN_FOLDER,
        VERSIONS_FOLDER,
        COLUMNS_FOLDER,
    )


def short_key(original: str, occurrence: int = 0) -> str:
    """The stable 14-character key of a sample whose own name can't be a key; `occurrence` counts
    equal names.
    """
    number = hash_text(f"{occurrence}/{original}", key=0)
    return "k" + "".join(_BASE32[(number >> shift) & 31] for shift in range(0, 65, 5))


def copy_key(key: str, copy: int) -> str:
    """The key of repeat number `copy` of a sample; copy 0 is the sample itself."""
    return f"{key}@{copy}" if copy else key


def split_member(name: str) -> tuple[str, str]:
    """A tar member's (key, field): the key ends at the first dot of the base name; without a dot,
    no field.
    """
    start = name.rfind("/") + 1
    dot = name.find(".", start)
    return (name, "") if dot < 0 else (name[:dot], name[dot + 1 :])


DOTS = (
    "a field is what follows the first dot of a file's name, so rename files with dots in their"
    " keys, such as 22.05.png to 22_05.png"
)
"""Advice on fields that are parts of keys."""


def quarantine_path(suffix: str = "") -> str:
    """The list of rejected raw samples; `suffix` tells it from the list of a set that is being
    replaced.
    """
    return f"quarantine{suffix}.jsonl"


def shard_path(folder: str, split: str, number: int) -> str:
    """`train/train-000012.tar`: zero-padded, so that brace ranges such as {000000..000639} list a
    split.
    """
    return f"{folder}/{split}-{number:06d}.tar"


def index_path(shard: str) -> str:
    """The index next to a shard: `train/train-000012.parquet`."""
    return shard.removesuffix(".tar") + ".parquet"


def table_path(folder: str) -> str:
    """The table of the shards in a folder: `train/shards.npy`."""
    return f"{folder}/shards.npy"


def is_relative(path: str) -> bool:
    """Whether `path` stays inside the folder of the manifest on every storage."""
    return not re.search(r"\\|\0|://", path) and not {"", ".", ".."} & {*path.split("/")}
