#!/bin/sh
# A Python int has any size, and a step of Apache Beam that returns large ones works: hashes of 64
# bits, the usual keys of a shuffle. One would expect that an annotation of the function, `-> int`,
# changes nothing at run time. Seen: Beam takes the annotation as the type of the elements, encodes
# them as signed integers of 64 bits, and every hash above 2**63 - 1 fails the pipeline, which is
# half of them. On a small sample it may pass.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "apache-beam==2.77.0"
cat > "$folder/run.py" <<'PYTHON'
import hashlib

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions


def hashed(key):
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def annotated(key: str) -> int:
    return hashed(key)


def outcome(function):
    pipeline = beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner"]))
    hashes = pipeline | beam.Create([f"photo-{number}" for number in range(20)]) | beam.Map(function)
    _ = hashes | beam.combiners.Count.PerElement()
    try:
        return pipeline.run().wait_until_finish()
    except OverflowError as error:
        return f"OverflowError: {str(error)[:80]}"


print(f"apache-beam {beam.__version__}")
plain, typed = outcome(hashed), outcome(annotated)
print("without an annotation:", plain)
print("with `-> int`:", typed)
assert plain == "DONE", plain
assert typed.startswith("OverflowError"), typed
PYTHON
"$folder/venv/bin/python" "$folder/run.py" 2> "$folder/log" || {
    tail -n 20 "$folder/log" >&2
    exit 1
}
echo "seen: the annotation alone makes hashes above 2**63 - 1 fail"
