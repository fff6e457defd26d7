"""The flags of runners that are other programs, which `make prism flink spark` fetches."""

from scripts import flink, spark
from scripts.job_server import REPOSITORY

PRISM = ("--runner=PrismRunner", f"--prism_location={REPOSITORY / '.tools' / 'bin' / 'prism'}")
FLINK = (
    "--runner=FlinkRunner",
    f"--flink_version={flink.FLINK_VERSION}",
    f"--flink_job_server_jar={flink.FOLDER / flink.JOB_SERVER}",
    "--parallelism=2",
)
SPARK = (
    "--runner=SparkRunner",
    "--spark_master_url=local[2]",
    f"--spark_job_server_jar={spark.FOLDER / spark.JOB_SERVER}",
)
