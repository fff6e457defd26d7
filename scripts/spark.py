"""Spark and Beam's runner for it from Maven Central: `python -m scripts.spark` (264 MB, once).

With `--spark_master_url=local[2]` the job server starts Spark; otherwise it submits to one.
Needs Java 11 or 17, and Maven.
"""

import sys
from pathlib import Path

from scripts import job_server

FOLDER = job_server.REPOSITORY / ".tools" / "spark"
SPARK_VERSION = "3.2.2"
JOB_SERVER = f"job-server-3-{job_server.RUNNER_VERSION}.jar"

_MAIN = "org.apache.beam.runners.spark.SparkJobServerDriver"
# Beam's runner expects the cluster to have these.
_SPARK = [
    f"org.apache.spark:spark-{part}_2.12:{SPARK_VERSION}" for part in ("core", "sql", "streaming")
]
_ARTIFACTS = [
    f"org.apache.beam:beam-runners-spark-3:{job_server.RUNNER_VERSION}",
    *_SPARK,
    "com.esotericsoftware:kryo-shaded:4.0.2",
]


def fetch(folder: Path = FOLDER) -> Path:
    """Spark and Beam's runner for it as one job server jar; returns that jar."""
    return job_server.fetch(folder / JOB_SERVER, _MAIN, _ARTIFACTS)


if __name__ == "__main__":
    try:
        fetch()
    except job_server.FetchError as error:
        sys.exit(f"FetchError: {error}")
