"""The benchmark of manifests writes what a reader reads, in both versions."""

import pytest

from benchmarks import manifest as benchmark
from shardset.format import manifest as manifests


@pytest.mark.parametrize("version", [1, 2])
def test_a_written_manifest_is_read(tmp_path, version):
    plan = benchmark.plan_of(1_000, 50, 30)
    benchmark.write(plan, str(tmp_path), version)
    assert benchmark.read(str(tmp_path)).seconds >= 0
    manifest = manifests.load(str(tmp_path)).manifest
    assert manifest.version == version
    assert sum(manifest.split("train").class_totals) == 1_000


def test_without_its_counts_a_manifest_of_many_classes_is_small(tmp_path):
    plan = benchmark.plan_of(10_000, 100, 1_000)
    for version in (1, 2):
        benchmark.write(plan, str(tmp_path / str(version)), version)
    listed, paged = (manifests.num_bytes(manifests.load(str(tmp_path / v)).manifest) for v in ("1", "2"))
    assert paged < listed / 3
