"""Examines raw bytes: whether they are a complete image, and what must be fixed before it is
stored.
"""

from typing import NamedTuple

from PIL import Image

from pipelines.images.options import CMYK_TO_RGB, ImageOptions, Verify, resized, stored_field
from shardset.errors import UndecodableImage
from shardset.format.images import FIELD_OF_EXTENSION, MAX_PIXELS, format_of, masks
from shardset.format.images.background import is_transparent, may_be_transparent
from shardset.format.images.jpeg_header import holds_more
from shardset.format.images.orientation import UPRIGHT, orientation_of
from shardset.format.images.pillow import PLUGINS, load, opened, reduce

ALPHA_TO_BACKGROUND = "alpha-to-background"
"""The fix of a transparent image that is re-encoded, which makes it opaque."""

TRANSPARENT = "transparent"
"""The mark of a transparent image that is stored as it is: counted, but no fix."""

TURNED_UPRIGHT = "turned-upright"
"""The fix of an image that is re-encoded and was stored in another EXIF orientation."""

TURNED = "turned"
"""The mark of an image that is stored as it is and must be turned by its EXIF data: counted, but no
fix.
"""

HOLDS_MORE = "holds-more"
"""The mark of a JPEG that holds more than its image and so gets no restart markers: counted, but no
fix.
"""

_LONGEST_SIDE = {"jpg": 65500, "webp": 16383}
"""The limits of libjpeg and libwebp in pixels."""

MARK_SEPARATOR = "+"


class Examined(NamedTuple):
    """An examined image: its field by content, and its marks joined by `+`, "" if there are none.

    Fixes are `cmyk-to-rgb`, `alpha-to-background`, `turned-upright`, and `renamed-png` for a PNG
    under another name. `transparent`, `turned` (which readers turn) and `holds-more` mark an image
    that is stored as it is. `size` is its (width, height) before `orientation` turns it; (0, 0) if
    the image was not opened.
    """

    field: str
    marks: str
    size: tuple[int, int] = (0, 0)
    orientation: int = UPRIGHT


def marks_of(marks: str) -> list[str]:
    """The marks of an image as a list."""
    return marks.split(MARK_SEPARATOR) if marks else []


def examine(
    data: bytes,
    *,
    field: str,
    verify: Verify,
    options: ImageOptions,
    image_size: tuple[int, int] = (0, 0),
) -> Examined:
    """Examines an image of a field, or with the extension `field`; raises UndecodableImage if it
    can't be a sample.

    A mask, by the name of its field, must have the (width, height) of its image, (0, 0) for any.

    `decode` decodes the whole image, the only way to find truncation (0.8 ms for a JPEG of 110 KB).
    `header` parses the header (0.03 ms) and takes an alpha channel for transparency. `none` reads
    only the first bytes, finds neither CMYK nor transparency nor orientation, and trusts `field` if
    `data` is empty.
    """
    extension = field.rpartition(".")[2].lower()
    named = FIELD_OF_EXTENSION.get(extension, extension)
    if verify == "none":
        actual = format_of(data) if data else named
        return Examined(actual, _fix(actual, named, "", options) if data else "")
    actual = format_of(data)
    with opened(data, actual, options.decoded_bytes) as image:
        orientation = orientation_of(data, image)
        if masks.is_mask_field(field):
            masks.check(image, orientation, image_size)
        size = image.size
        if options.reencodes:
            check_sides(resized(size, options.resize_shorter), stored_field(actual, options))
        unchanged = is_stored_unchanged(image, data, actual, options)
        fix = _fix(actual, named, image.mode, options)
        if verify == "decode":
            # An eighth of a JPEG saves the transforms, which can't fail. All of the entropy-coded
            # data is still decoded.
            reduce(image, data, actual, (1, 1))
            load(image, data, actual)
        transparent = is_transparent(image) if verify == "decode" else may_be_transparent(image)
    opacity = (TRANSPARENT if unchanged else ALPHA_TO_BACKGROUND) if transparent else ""
    unchanged &= fix != CMYK_TO_RGB
    turn = (TURNED if unchanged else TURNED_UPRIGHT) if orientation != UPRIGHT else ""
    keeps_more = options.jpeg_restart and unchanged and actual == "jpg" and holds_more(data)
    marks = fix, opacity, turn, HOLDS_MORE if keeps_more else ""
    return Examined(actual, MARK_SEPARATOR.join(filter(None, marks)), size, orientation)


def is_stored_unchanged(image: Image.Image, data: bytes, field: str, options: ImageOptions) -> bool:
    """Whether an image that needs no fix is stored byte for byte; `field` is its format."""
    if stored_field(field, options) != field:
        return False
    if options.resize_shorter is None:
        return True
    return (
        resized(image.size, options.resize_shorter) == image.size
        and orientation_of(data, image) == UPRIGHT
    )


def check_sides(size: tuple[int, int], field: str) -> None:
    """Raises UndecodableImage if the format `field` can't have this size."""
    longest = _LONGEST_SIDE.get(field, MAX_PIXELS)
    if max(size) > longest:
        sides = f"{size[0]} x {size[1]}, at most {longest} a side"
        raise UndecodableImage(f"too large for {field}", sides)


def _fix(actual: str, named: str, mode: str, options: ImageOptions) -> str:
    if actual == "jpg" and mode == "CMYK":
        return CMYK_TO_RGB
    named_right = not named or PLUGINS.get(named) == PLUGINS[actual]
    return "" if named_right or options.image_format != "keep" else f"renamed-{actual}"
