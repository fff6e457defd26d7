"""Facts about images that the build and the reader share: extensions and the pixel limit."""

FIELD_OF_EXTENSION = {
    "jpg": "jpg",
    "jpeg": "jpg",
    "png": "png",
    "ppm": "ppm",
    "pgm": "pgm",
    "pbm": "pbm",
    "bmp": "bmp",
    "gif": "gif",
    "webp": "webp",
    "tif": "tif",
    "tiff": "tif",
    "avif": "avif",
    "ico": "ico",
    "jp2": "jp2",
}
"""The field of each image extension (lower case, without the dot)."""

IMAGE_FIELDS = frozenset(FIELD_OF_EXTENSION.values())
"""Fields under which the build stores images."""


def is_image_field(field: str) -> bool:
    """Whether a field holds an image: by its name, such as `jpg` or `left.jpg`."""
    return field.rpartition(".")[2] in IMAGE_FIELDS


MAX_PIXELS = 178_956_970
"""Pillow refuses larger images by itself (twice its MAX_IMAGE_PIXELS), so no limit of ours may be higher."""
