#!/bin/sh
# Hugging Face datasets writes a table of images that came from files to Parquet. One would expect
# the images in it, as save_to_disk puts them into its Arrow files. Seen: to_parquet stores the paths
# of this machine and no bytes, without a word, so the file holds no image on another one. Embedding
# them first (map over the arrow format) gives the bytes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "datasets==5.2.0" "pillow==12.3.0"
cat > "$folder/run.py" <<'PYTHON'
import sys
from pathlib import Path

import datasets
import pyarrow.parquet as pq
from datasets import Dataset, Image
from datasets.table import embed_table_storage
from PIL import Image as Pillow

folder = Path(sys.argv[1])
datasets.disable_progress_bars()
path = folder / "one.png"
Pillow.new("RGB", (8, 8), (200, 0, 0)).save(path)
images = Dataset.from_dict({"image": [str(path)]}).cast_column("image", Image())


def stored(table, name):
    table.to_parquet(folder / name)
    return pq.read_table(folder / name)["image"].to_pylist()[0]


print(f"datasets {datasets.__version__}")
plain = stored(images, "plain.parquet")
print("to_parquet:", {**plain, "path": Path(plain["path"]).name})
assert plain["bytes"] is None and plain["path"].endswith("one.png")
embedded = stored(
    images.with_format("arrow").map(embed_table_storage, batched=True), "embedded.parquet"
)
print("embedded first:", len(embedded["bytes"]), "bytes,", embedded["path"])
assert embedded["bytes"] == path.read_bytes()
images.save_to_disk(folder / "disk")
kept = Dataset.load_from_disk(folder / "disk").with_format("arrow")[0]["image"].to_pylist()[0]
print("save_to_disk:", len(kept["bytes"] or b""), "bytes")
assert kept["bytes"] == path.read_bytes()
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder"
