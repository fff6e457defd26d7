"""The benchmark of manifests writes what a reader reads."""

from benchmarks import manifest as benchmark
from shardset.format import manifest as manifests


def test_a_written_manifest_is_read(tmp_path):
    plan = benchmark.plan_of(1_000, 50, 10)
    benchmark.write(plan, str(tmp_path))
    assert min(benchmark.read(str(tmp_path))) >= 0
    assert manifests.load(str(tmp_path)).manifest.split("train").class_totals == [100] * 10
