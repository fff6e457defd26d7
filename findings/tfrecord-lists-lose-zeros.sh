#!/bin/sh
# The tfrecord package reads a feature with several byte strings, such as the masks of an image. One
# would expect the strings that were written. Seen: they become a NumPy array of fixed width, which
# drops the zero bytes at the end of each, so binary files come back shorter and lengths are lost.
# A feature with one string comes back whole.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tfrecord==1.14.6" "numpy==2.4.6"
cat > "$folder/run.py" <<'PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path

from tfrecord.reader import tfrecord_loader
from tfrecord.writer import TFRecordWriter

path = str(Path(sys.argv[1], "data.tfrecord"))
masks = [b"\x01\x02\x00\x00", b"\x03\x00\x04"]
writer = TFRecordWriter(path)
writer.write({"mask": (masks[0], "byte"), "masks": (masks, "byte")})
writer.close()
[found] = tfrecord_loader(path, None, {"mask": "byte", "masks": "byte"})
one, several = bytes(found["mask"]), [bytes(mask) for mask in found["masks"]]
print("tfrecord", version("tfrecord"))
print("one:", one, "of", masks[0])
print("several:", several, "of", masks, "as", found["masks"].dtype)
assert one == masks[0]
assert several == [b"\x01\x02", b"\x03\x00\x04"]
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder"
