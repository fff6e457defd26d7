"""The image options of a build, and what follows from them before an image is decoded."""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shardset.errors import ConfigError
from shardset.format.images import background as backgrounds
from shardset.format.images.background import WHITE, Background
from shardset.format.images.limits import DECODED_BYTES
from shardset.format.manifest import Manifest
from shardset.settings import Count, check, setting

Verify = Literal["decode", "header", "none"]
ImageFormat = Literal["keep", "jpg", "png", "ppm", "webp"]

CMYK_TO_RGB = "cmyk-to-rgb"
"""The fix of a CMYK image, which is re-encoded."""

_REWRITTEN_AS = {
    "gif": "png",
    "bmp": "png",
    "tif": "png",
    "avif": "png",
    "jp2": "png",
    "pbm": "pgm",
}
"""The formats of resized images whose own format is not written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """The image options of a build. By default images are stored byte for byte.

    `resize_shorter` is in pixels. `quality` (1 to 100) applies to re-encoded JPEGs and WebPs. An
    image that takes more than `decoded_bytes` of memory is refused before it is decoded;
    `decoded_bytes` also limits the images that a process decodes at once.
    `jpeg_restart` adds restart markers to JPEGs without loss, so that readers can decode only the
    part that a crop needs. Re-encoded transparent images are put on `background`.
    """

    resize_shorter: Count | None = setting(
        None, "shrink images until their shorter side has so many pixels", metavar="N"
    )
    quality: Annotated[int, Meta(ge=1, le=100)] = setting(95, "quality of re-encoded JPEG and WebP")
    image_format: ImageFormat = setting(
        "keep", "convert images to this format; keep leaves each in its own"
    )
    jpeg_restart: bool = setting(
        False, "rewrite JPEGs without loss, so that readers decode only what a crop needs"
    )
    background: Background = setting(
        WHITE,
        "behind transparent pixels when re-encoding: white (default), black, #rrggbb",
        read=backgrounds.parse,
        metavar="COLOUR",
    )
    decoded_bytes: Count = setting(
        DECODED_BYTES, "bytes of memory of the images that a worker decodes at once"
    )

    def __post_init__(self) -> None:
        check(self)
        backgrounds.check(self.background)
        if self.background != WHITE and not self.reencodes:
            raise ConfigError(
                "--background is for images that are re-encoded, and none is; add"
                " --resize-shorter or --image-format, or set image.background in training, which"
                " puts stored images on it"
            )

    @property
    def reencodes(self) -> bool:
        """Whether images that need no fix may be re-encoded."""
        return self.resize_shorter is not None or self.image_format != "keep"


DEFAULTS = ImageOptions()


def options_of(manifest: Manifest) -> ImageOptions:
    """The image options of the build of a set."""
    return msgspec.convert(manifest.provenance.options.get("image", {}), ImageOptions)


def options_to_read(manifest: Manifest) -> ImageOptions:
    """The options to decode the stored images of a set with: its build may have been given more
    memory than usual.
    """
    image = manifest.provenance.options.get("image")
    given = image.get("decoded_bytes") if isinstance(image, dict) else None
    return ImageOptions(
        decoded_bytes=max(given, DECODED_BYTES) if type(given) is int else DECODED_BYTES
    )


def stored_field(field: str, options: ImageOptions) -> str:
    """The field of a stored image of the format `field`, whatever its size."""
    if options.image_format != "keep":
        return options.image_format
    return field if options.resize_shorter is None else _REWRITTEN_AS.get(field, field)


def resized(size: tuple[int, int], shorter: int | None) -> tuple[int, int]:
    """The size of an image with its shorter side reduced to `shorter`; never enlarged."""
    if shorter is None or min(size) <= shorter:
        return size
    # rounded half up
    width, height = ((2 * side * shorter + min(size)) // (2 * min(size)) for side in size)
    return width, height
