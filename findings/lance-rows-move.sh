#!/bin/sh
# Lance: `update` of one row, and `merge_insert` of one that is there. One would expect the rows
# where they were, as in a table that is read by position (order files, samplers, splits by index).
# Seen: the changed row is at the end, so every row behind it has another position.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "pylance==14.0.0" "pyarrow==25.0.1"
cat > "$folder/run.py" <<'PYTHON'
import sys
from pathlib import Path

import lance
import pyarrow as pa

print("pylance", lance.__version__)
table = pa.table({"id": [0, 1, 2, 3], "label": [5, 5, 5, 5]})


def order(name, change):
    dataset = lance.write_dataset(table, Path(sys.argv[1], name))
    change(dataset)
    found = lance.dataset(Path(sys.argv[1], name)).take([0, 1, 2, 3])["id"].to_pylist()
    print(name, found)
    return found


updated = order("update", lambda set_: set_.update({"label": "7"}, where="id = 1"))
changed = pa.table({"id": [1], "label": [7]})
merged = order(
    "merge_insert",
    lambda set_: set_.merge_insert("id").when_matched_update_all().execute(changed),
)
assert updated == merged == [0, 2, 3, 1]
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder"
