#!/bin/sh
# A JPEG decoded at an eighth (simplejpeg, OpenCV's IMREAD_REDUCED, Pillow's draft) is the usual way
# to a small image. One would expect a picture of 250 columns to fill the 32 columns that come, so
# that boxes and keypoints scale by 32/250, and so that it may be resized like any image. Seen: each
# column is 8 of the image, 32 reach over 256, and the last one holds padding of the encoder. A
# mark at column 225 comes out at 219.7. Pillow's `draft` tells the part that is the image; the
# others do not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
    "pillow==12.3.0" "simplejpeg==1.9.0" "opencv-python-headless==4.13.0.90" "numpy==2.4.6"
cat > "$folder/run.py" <<'PYTHON'
import io
from importlib.metadata import version

import cv2
import numpy as np
import simplejpeg
from PIL import Image

WIDTH, HEIGHT, AT = 250, 90, 225
bump = 255 * np.exp(-(((np.arange(WIDTH) + 0.5 - AT) / 10) ** 2))
pixels = np.repeat(bump.round().astype(np.uint8)[None, :, None], HEIGHT, axis=0).repeat(3, axis=2)
file = io.BytesIO()
Image.fromarray(pixels).save(file, "JPEG", quality=95, subsampling=0)
jpeg = file.getvalue()


def centre(image):
    """The column, in pixels of this image, at which the mark lies."""
    row = np.asarray(image)[len(np.asarray(image)) // 2, :, 0].astype(float)
    return ((np.arange(len(row)) + 0.5) * row).sum() / row.sum()


drafted = Image.open(io.BytesIO(jpeg))
_, box = drafted.draft("RGB", (WIDTH // 8, HEIGHT // 8))
reduced = {
    "simplejpeg": simplejpeg.decode_jpeg(
        jpeg, min_width=WIDTH / 8, min_height=HEIGHT / 8, min_factor=1
    ),
    "opencv-python-headless": cv2.imdecode(
        np.frombuffer(jpeg, np.uint8), cv2.IMREAD_REDUCED_COLOR_8
    ),
    "pillow": drafted,
}
for name, image in reduced.items():
    columns = np.asarray(image).shape[1]
    by_share, by_eighths = centre(image) * WIDTH / columns, centre(image) * 8
    print(
        f"{name} {version(name)}: {columns} columns; the mark at {AT} is at {by_share:.1f} if they"
        f" are the image, {by_eighths:.1f} if each is 8 columns"
    )
    assert columns == 32 and abs(by_share - 219.7) < 0.2 and abs(by_eighths - AT) < 0.2
print("pillow's draft says that the image is", box)
assert box == (0, 0, 31.25, 11.25)
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
