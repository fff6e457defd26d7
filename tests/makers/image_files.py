"""One small file of each kind of image: format x mode x marker x bit depth, with its verdict."""

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.makers.odd_images import (
    ORIENTATION,
    SIZE,
    encoded,
    jpeg,
    picture,
    png_chunk,
    png_of,
    sixteen_bit,
    with_alpha,
)

UNSUPPORTED, NO_LEVELS = "unsupported format", "no 8-bit form"


class ImageFile(NamedTuple):
    """An image: extension, bytes, why it is refused ("" if it isn't), a file of the same pixels."""

    field: str
    data: bytes
    reason: str = ""
    same: bytes = b""


TURNED_SIZE = (52, 37)
XMP = '<rdf tiff:Orientation="%d"/>'
XMP_OF_JPEG = b"http://ns.adobe.com/xap/1.0/\0" + XMP.encode()
PADDINGS = {"fill": b"\xff\xff", "zeros": b"\0\0\0", "RST": b"\xff\xd3"}


def _in_text(kind: str, exif: bytes, xmp: bytes) -> dict[str, PngInfo]:
    """The metadata of a PNG as ImageMagick writes it, or as XMP."""
    info = PngInfo()
    if kind == "XMP":
        info.add_itxt("XML:com.adobe.xmp", xmp.decode())
    else:
        lines = f"\nexif\n{len(exif):8d}\n{exif[:30].hex()}\n{exif[30:].hex()}\n"
        info.add_text("Raw profile type exif", lines, zip=kind == "zTXt")
    return {"pnginfo": info}


TURNED: dict = {
    "jpg": ("JPEG", lambda exif, xmp: {"quality": 95, "exif": exif}),
    "jpg XMP": ("JPEG", lambda exif, xmp: {"quality": 95, "xmp": xmp}),
    "jpg progressive": (
        "JPEG",
        lambda exif, xmp: {"quality": 95, "progressive": True, "exif": exif},
    ),
    **{f"jpg {name}": ("JPEG", lambda exif, xmp: {"exif": exif}) for name in PADDINGS},
    "png": ("PNG", lambda exif, xmp: {"exif": exif}),
    "png at its end": ("PNG", lambda exif, xmp: {"exif": exif}),
    **{
        f"png {kind}": ("PNG", lambda exif, xmp, kind=kind: _in_text(kind, exif, xmp))
        for kind in ("tEXt", "zTXt", "XMP")
    },
    "webp": ("WEBP", lambda exif, xmp: {"lossless": True, "exif": exif}),
    "webp XMP": ("WEBP", lambda exif, xmp: {"lossless": True, "xmp": xmp}),
    "avif": ("AVIF", lambda exif, xmp: {"exif": exif}),
    "tif": ("TIFF", lambda exif, xmp: {"exif": exif}),
    "tif XMP": ("TIFF", lambda exif, xmp: {"tiffinfo": {0x02BC: xmp}}),
    "tif LZW XMP": (
        "TIFF",
        lambda exif, xmp: {"tiffinfo": {0x02BC: xmp}, "compression": "tiff_lzw"},
    ),
}
"""Where the orientation stands, by the format of the file."""


def turned_file(
    kind: str, orientation: int, size: tuple[int, int] = TURNED_SIZE, mode: str = "RGB"
) -> bytes:
    """A picture that is stored turned."""
    name, options = TURNED[kind]
    exif = Image.Exif()
    exif[0x010E] = "a description, which comes before the orientation"
    exif[ORIENTATION] = orientation
    metadata = options(exif.tobytes(), XMP.encode() % orientation)
    data = encoded(picture(3, size).convert(mode), name, **metadata)
    if padding := PADDINGS.get(kind.removeprefix("jpg ")):
        at = data.index(b"\xff\xe1")
        return data[:at] + padding + data[at:]
    if kind == "png at its end":
        at = data.index(b"eXIf") - 4
        end = data.index(b"IDAT") - 4
        return data[:at] + data[end:-12] + data[at:end] + data[-12:]
    return data


SAVED = {
    "jpg": ("JPEG", "L RGB CMYK"),
    "png": ("PNG", "1 L LA P RGB RGBA"),
    "gif": ("GIF", "1 L P RGB"),
    "bmp": ("BMP", "1 L P RGB RGBA"),
    "tif": ("TIFF", "1 L LA P RGB RGBA RGBX CMYK LAB"),
    "webp": ("WEBP", "L RGB RGBA"),
    "pbm": ("PPM", "1"),
    "pgm": ("PPM", "L"),
    "ppm": ("PPM", "RGB"),
    "avif": ("AVIF", "L RGB RGBA"),
    "jp2": ("JPEG2000", "L LA RGB RGBA YCbCr"),
}
WITH_OPTIONS = (
    ("jpg", "JPEG", "RGB", {"progressive": True}),
    ("jpg", "JPEG", "RGB", {"subsampling": "4:4:4"}),
    ("jpg", "JPEG", "CMYK", {"subsampling": "4:2:0"}),
    ("jpg", "MPO", "RGB", {"save_all": True, "append_images": [picture(1)]}),
    ("png", "PNG", "RGB", {"save_all": True, "append_images": [picture(1)]}),
    ("png", "PNG", "P", {"bits": 4}),
    ("gif", "GIF", "RGB", {"save_all": True, "append_images": [picture(1)]}),
    ("webp", "WEBP", "RGB", {"save_all": True, "append_images": [picture(1)]}),
    ("webp", "WEBP", "RGBA", {"lossless": True}),
    ("tif", "TIFF", "RGB", {"save_all": True, "append_images": [picture(1)]}),
    ("tif", "TIFF", "RGB", {"big_tiff": True}),
    ("tif", "TIFF", "RGB", {"compression": "tiff_lzw"}),
    ("tif", "TIFF", "RGB", {"compression": "jpeg"}),
    ("tif", "TIFF", "1", {"compression": "group4"}),
    ("tif", "TIFF", "RGB", {"tiffinfo": {ORIENTATION: 6}}),
)


def _with_alpha(mode: str) -> Image.Image:
    image = picture().convert(mode.replace("YCbCr", "RGB").replace("LAB", "RGB")).convert(mode)
    if mode in ("LA", "RGBA"):
        image.putalpha(Image.linear_gradient("L").resize(SIZE))
    return image


def _saved() -> Iterator[tuple[str, ImageFile]]:
    for field, (file_format, modes) in SAVED.items():
        for mode in modes.split():
            yield f"{field} {mode}", ImageFile(field, encoded(_with_alpha(mode), file_format))
    for field, file_format, mode, options in WITH_OPTIONS:
        value = next(iter(options.values()))
        name = f"{field} {file_format} {mode} {' '.join(options)} {value}"
        yield name, ImageFile(field, encoded(_with_alpha(mode), file_format, **options))
    for field, file_format in (("png", "PNG"), ("tif", "TIFF"), ("jp2", "JPEG2000")):
        yield f"{field} I;16", ImageFile(field, encoded(sixteen_bit(), file_format))
    for kind in (np.float32, np.int32):
        image = Image.fromarray(np.full((5, 4), 70_000, kind))
        yield f"tif {kind.__name__}", ImageFile("tif", encoded(image, "TIFF"), NO_LEVELS)
    for number, kind in enumerate(TURNED):
        data = turned_file(kind, 1 + number % 8)
        yield f"{kind} turned {1 + number % 8}", ImageFile(kind.split()[0], data)


def _marked(data: bytes, transform: int | None, ids: bytes, jfif: bool) -> bytes:
    """A JPEG with Adobe's marker and JFIF's or without, and with other component ids."""
    out: list = [data[:2]]
    at = 2
    if transform is not None:
        out.append(b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0" + bytes([transform]))
    while True:
        kind, end = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        segment = bytearray(data[at:end])
        if kind == 0xC0:
            segment[10::3] = ids[: segment[9]]
        if kind == 0xDA:
            segment[5:-3:2] = ids[: segment[4]]
            return b"".join([*out, segment, data[end:]])
        if kind != 0xEE and (jfif or kind != 0xE0):
            out.append(segment)
        at = end


def _jpegs() -> Iterator[tuple[str, ImageFile]]:
    for mode, ids in (
        ("RGB", b"\1\2\3"),
        ("RGB", b"RGB"),
        ("RGB", b"\0\1\2"),
        ("CMYK", b"\1\2\3\4"),
        ("CMYK", b"CMYK"),
    ):
        for transform in (None, 0, 1) if mode == "RGB" else (None, 0, 2):
            for jfif in (True, False) if transform is None and mode == "RGB" else (False,):
                name = f"jpg {mode} ids {ids!r} Adobe {transform} JFIF {jfif}"
                data = _marked(encoded(_with_alpha(mode), "JPEG"), transform, ids, jfif)
                yield name, ImageFile("jpg", data)
    for at, value, name in ((4, 12, "of 12 bits"), (9, 2, "of 2 bands")):
        odd = bytearray(jpeg())
        odd[odd.index(b"\xff\xc0") + at] = value
        yield f"jpg {name}", ImageFile("jpg", bytes(odd), UNSUPPORTED)


def tiff(
    bits: int,
    bands: int,
    kind: int = 1,
    photometric: int = 1,
    order: str = "<",
    packing: int = 1,
    extra: tuple[int, ...] = (),
    apart: bool = False,
    pixels: bytes = b"",
) -> bytes:
    """A TIFF of 8 x 8 pixels, random ones if none are given; `kind` is 1 for numbers, 2 for signed
    ones and 3 for floats. Bands of the kinds `extra` come last; all may be `apart`.
    """
    pixels = pixels or np.random.default_rng(bits).bytes(8 * bits * bands)
    num_parts = bands if apart else 1
    each = len(pixels) // num_parts
    tags = {256: [8], 257: [8], 258: [bits] * bands, 259: [packing], 262: [photometric]}
    tags |= {273: [8 + part * each for part in range(num_parts)], 277: [bands], 278: [8]}
    tags |= {279: [each] * num_parts, 284: [1 + apart], 339: [kind] * bands}
    if extra:
        tags[338] = [*extra]
    tags = dict(sorted(tags.items()))
    at, entries, tail = 8 + len(pixels), b"", b""
    for tag, values in tags.items():
        body = struct.pack(f"{order}{len(values)}H", *values)
        if len(body) > 4:
            body, tail = struct.pack(f"{order}I", at + 6 + 12 * len(tags) + len(tail)), tail + body
        entries += struct.pack(f"{order}HHI", tag, 3, len(values)) + body.ljust(4, b"\0")
    magic = b"II*\0" if order == "<" else b"MM\0*"
    directory = struct.pack(f"{order}H", len(tags)) + entries + bytes(4)
    return magic + struct.pack(f"{order}I", at) + pixels + directory + tail


def _tiffs() -> Iterator[tuple[str, ImageFile]]:
    for order in "<>":
        for bits, bands, kind, photometric, reason in (
            (2, 1, 1, 1, ""),
            (4, 1, 1, 0, ""),
            (16, 1, 1, 1, ""),
            (16, 1, 2, 1, NO_LEVELS),
            (32, 1, 2, 1, NO_LEVELS),
            (32, 1, 3, 1, NO_LEVELS),
            (8, 1, 1, 0, ""),
            (16, 3, 1, 2, ""),
            (16, 4, 1, 5, ""),
            (8, 5, 1, 1, UNSUPPORTED),
            (32, 3, 3, 2, UNSUPPORTED),
        ):
            name = f"tif {bits} bits x {bands}, {kind}, photometric {photometric} {order}"
            yield name, ImageFile("tif", tiff(bits, bands, kind, photometric, order), reason)
    for bands, extra, apart, reason in (
        (4, (0,), False, ""),
        (4, (2,), False, ""),
        (4, (2,), True, ""),
        (4, (0,), True, UNSUPPORTED),
        (5, (0, 0), False, UNSUPPORTED),
        (5, (2, 0), False, UNSUPPORTED),
        (6, (0, 0, 0), False, UNSUPPORTED),
    ):
        name = f"tif RGB and {extra}{' apart' * apart}"
        data = tiff(8, bands, photometric=2, extra=extra, apart=apart)
        yield name, ImageFile("tif", data, reason)
    plain = tiff(8, 1)
    yield "tif in the wrong order", ImageFile("tif", b"II\0*" + plain[4:], "", plain)
    yield "tif of unsigned 32 bits", ImageFile("tif", tiff(32, 1), NO_LEVELS)
    yield "tif compressed by LERC", ImageFile("tif", tiff(8, 1, packing=34887), UNSUPPORTED)


def _pngs() -> Iterator[tuple[str, ImageFile]]:
    whole = with_alpha()
    large = zlib.compress(bytes(2 << 20))
    for name, chunk in {
        "icc": png_chunk(b"iCCP", b"big\0\0" + large),
        "text": png_chunk(b"zTXt", b"workflow\0\0" + large),
        "international text": png_chunk(b"iTXt", b"workflow\0\1\0\0\0" + large),
        "text of an unknown compression": png_chunk(b"zTXt", b"workflow\0\7" + large),
        "cut gamma": png_chunk(b"gAMA", b"\0"),
        "cut resolution": png_chunk(b"pHYs", b"\0"),
        "cut frames": png_chunk(b"acTL", b"\0"),
        "text with a wrong checksum": png_chunk(b"tEXt", b"a\0b")[:-1] + b"!",
    }.items():
        yield f"png {name}", ImageFile("png", whole[:33] + chunk + whole[33:], "", whole)
        data = whole[:-12] + chunk + whole[-12:]
        yield f"png {name} at its end", ImageFile("png", data, "", whole)
    yield "png without width", ImageFile("png", png_of(0, 8), "damaged")
    for bits in (1, 2, 4, 8, 16):
        rows = b"".join(b"\0" + bytes(range(first, first + 2 * bits)) for first in range(8))
        data = png_of(16, 8, png_chunk(b"IDAT", zlib.compress(rows)), bits=bits)
        yield f"png grey {bits}", ImageFile("png", data)
    colours = np.full((8, 8, 3), 0x1234, ">u2")
    colours[2:, :, 1] += np.arange(8, dtype=">u2")  # all have the same upper bytes
    alpha = np.where((colours == 0x1234).all(2), 0, 0xFFFF)[:, :, None]
    rows, alpha_rows = (
        zlib.compress(b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels))
        for pixels in (colours, np.concatenate([colours, alpha], 2))
    )
    chunks = png_chunk(b"tRNS", b"\x12\x34" * 3), png_chunk(b"IDAT", rows)
    data = png_of(8, 8, *chunks, bits=16, colour=2)
    same = png_of(8, 8, png_chunk(b"IDAT", alpha_rows), bits=16, colour=6)
    yield "png RGB 16 with a transparent colour", ImageFile("png", data, "", same)


def _netpbms() -> Iterator[tuple[str, ImageFile]]:
    wide = np.arange(96, dtype=">u2") * 40
    for field, head, body in (
        ("pgm", b"P5 12 8 4095 ", wide.tobytes()),
        ("pgm", b"P2 12 8 4095 ", b" ".join(b"%d" % one for one in wide)),
        ("pgm", b"P5 12 8 100 ", bytes(range(96))),
        ("ppm", b"P6 4 8 65535 ", wide.tobytes()),
        ("ppm", b"P3 4 8 100 ", b" ".join(b"%d" % one for one in range(96))),
        ("pbm", b"P1 12 8 ", b"01" * 48),
    ):
        yield f"{field} {head.decode()}", ImageFile(field, head + body)
    yield "ppm of floats", ImageFile("ppm", b"Pf\n4 8\n-1.0\n" + bytes(4 * 32), UNSUPPORTED)


def _others() -> Iterator[tuple[str, ImageFile]]:
    header = struct.pack("<IHHIIiiHHIIiiII", 182, 0, 0, 54, 40, 8, 8, 1, 16, 0, 128, 0, 0, 0, 0)
    yield "bmp 16 bits", ImageFile("bmp", b"BM" + header + bytes(range(128)))
    avif = encoded(picture(), "AVIF")
    yield "avif named by its compatible brand", ImageFile("avif", avif[:8] + b"mif1" + avif[12:])
    yield "heic", ImageFile("avif", avif[:8] + avif[8:].replace(b"avif", b"heic"), UNSUPPORTED)


_MAKERS = (_saved, _jpegs, _tiffs, _pngs, _netpbms, _others)
FILES: dict[str, ImageFile] = {name: file for make in _MAKERS for name, file in make()}
"""By what they are."""
