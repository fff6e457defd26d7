"""Makes small pictures in any format, the same for the same arguments."""

from shardset.format.images import FIELD_OF_EXTENSION
from tests.makers.shardset import encode, pixels

FORMATS = {
    "jpg": "JPEG",
    "png": "PNG",
    "ppm": "PPM",
    "pgm": "PPM",
    "pbm": "PPM",
    "bmp": "BMP",
    "gif": "GIF",
    "webp": "WEBP",
    "tif": "TIFF",
    "avif": "AVIF",
    "jp2": "JPEG2000",
}


def image_bytes(seed: int, extension: str = "png", *, height: int = 8, width: int = 8) -> bytes:
    """The bytes of a file of that extension; another seed gives another picture.

    `pgm` is grey, `pbm` black and white, all else RGB.
    """
    image = pixels(seed, height, width)
    if extension in ("pgm", "pbm"):
        image = image[:, :, 0] if extension == "pgm" else image[:, :, 0] > 127
    return encode(image, FORMATS[FIELD_OF_EXTENSION[extension]])
