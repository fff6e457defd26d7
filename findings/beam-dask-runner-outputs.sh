#!/bin/sh
# Apache Beam's DaskRunner runs a pipeline with two branches, and a step with two tagged outputs,
# and ends with the state DONE. One would expect what every other runner gives, or an error. Seen:
# only the branch that was added last writes anything, and each tagged output holds the elements
# of all of them.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "apache-beam==2.77.0" "dask==2026.3.0" "distributed==2026.3.0"
cat > "$folder/run.py" <<'PYTHON'
import sys
from pathlib import Path

import apache_beam as beam
import dask
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.dask.dask_runner import DaskRunner

folder = Path(sys.argv[1])


def note(name):
    def write(element):
        with open(folder / name, "a") as file:
            file.write(f"{element}\n")

    return write


def lines(name):
    path = folder / name
    return sorted(path.read_text().split()) if path.exists() else []


def run(runner, prefix):
    pipeline = beam.Pipeline(runner=runner, options=PipelineOptions([]))
    numbers = pipeline | beam.Create([1, 2, 3, 4])
    numbers | "first" >> beam.Map(note(f"{prefix}first"))
    numbers | "second" >> beam.Map(note(f"{prefix}second"))
    states = [pipeline.run().wait_until_finish()]
    pipeline = beam.Pipeline(runner=runner, options=PipelineOptions([]))
    even_odd = (
        pipeline
        | beam.Create([1, 2, 3, 4])
        | beam.Partition(lambda number, _: number % 2, 2)
    )
    even_odd[1] | beam.Map(note(f"{prefix}odd"))
    states.append(pipeline.run().wait_until_finish())
    names = "first", "second", "odd"
    return states, {name: lines(f"{prefix}{name}") for name in names}


if __name__ == "__main__":
    print(f"apache-beam {beam.__version__}, dask {dask.__version__}")
    states, expected = run("DirectRunner", "direct-")
    print("DirectRunner", *states, expected)
    assert expected == {"first": list("1234"), "second": list("1234"), "odd": list("13")}
    states, found = run(DaskRunner(), "dask-")
    print("DaskRunner", *states, found)
    assert set(states) == {"DONE"}
    assert found == {"first": [], "second": list("1234"), "odd": list("1234")}
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder" 2> "$folder/log" || {
    tail -n 20 "$folder/log" >&2
    exit 1
}
echo "seen: the first branch is left out, and the odd numbers are all numbers"
