"""What a path tells about an image: its key and the field of its bytes."""

UNKNOWN_FIELD = "img"
"""The field of an image whose path does not tell its format; the build corrects it by content."""


def extension(path: str) -> str:
    """The last extension in lower case, without its dot; empty if there is none."""
    return split(path)[1].lower()


def without_extension(path: str) -> str:
    """The path without its last extension."""
    return split(path)[0]


def split(path: str) -> tuple[str, str]:
    """`posixpath.splitext` in a third of its time, without the dot; a name's leading dots begin no extension."""
    stem, _, last = path.rpartition(".")
    return (stem, last) if "/" not in last and stem.rpartition("/")[2].strip(".") else (path, "")


def is_hidden(path: str) -> bool:
    """Whether the file or a folder above it starts with a dot."""
    return path.startswith(".") or "/." in path


def is_text(path: str) -> bool:
    """Whether the path is valid Unicode, which the name of a local file need not be."""
    return path.isascii() or printable(path) == path


def printable(path: str) -> str:
    """The path with every byte that is not UTF-8 written as `\\xNN`."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
