"""How large a stored image is once it is upright, by its header."""

import struct

from shardset.errors import UndecodableImage
from shardset.format.images import format_of, pillow
from shardset.format.images.jpeg_header import frame_of
from shardset.format.images.orientation import orientation_of, upright_size

Size = tuple[int | None, int | None]
"""The width and height of an upright image; None if its header does not tell."""

_PNG_SIZE = struct.Struct(">16xII")


def size_of(data: bytes) -> Size:
    """(width, height); Nones if it has no header of an image, as one that is stored as it is."""
    try:
        kind, image, size = format_of(data), None, None
        if kind == "jpg" and (frame := frame_of(data)):
            size = frame.width, frame.height
        elif kind == "png" and len(data) >= _PNG_SIZE.size:
            size = _PNG_SIZE.unpack_from(data)
        if not (size and all(size)):
            image = pillow.header(data, kind)
            size = image.size
        return upright_size(size, orientation_of(data, image))
    except UndecodableImage:
        return None, None
