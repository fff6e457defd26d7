"""A PCollection becomes the same set whatever its order, bundles and runner; what is wrong with an
element is said, and a stopped pipeline goes on.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.window import FixedWindows, TimestampedValue

from pipelines import WriteShards
from pipelines.pipeline import WriteShard
from pipelines.plan import paths
from pipelines.runners.on_beam import counters_of
from pipelines.transforms import write_shards
from shardset import Raw
from shardset.errors import ChangedInput, ConfigError, SourceError, TooManyBad
from tests.makers import runners
from tests.makers.built import HERE, manifest_of, verified
from tests.makers.images import image_bytes
from tests.makers.shardset import encode
from tests.makers.stored import files_of, quarantined, samples_of


class Row(NamedTuple):
    id: str
    picture: dict[str, Any]
    kind: str
    part: str


LOCAL = ["--runner=FnApiRunner", *HERE]
COLUMNS = {"key": "id", "image": "picture.bytes", "label": "kind", "split": "part"}


def wrong(key: Any, image: Any) -> Raw:
    return Raw(key, image)


def raws(numbers=range(40)) -> list[Raw]:
    return [
        Raw(
            f"photo/{number:03d}",
            image_bytes(number, "jpg" if number % 3 else "png"),
            number % 2,
            {"txt": f"number {number}", "json": {"number": number}},
        )
        for number in numbers
    ]


def split_of(raw: Raw) -> str:
    return "val" if raw.key.endswith("7") else "train"


def written(output: Path, elements: list[Any], *flags: str, **options: Any) -> dict[str, bytes]:
    """The files of the set that a pipeline writes."""
    options = {"samples_per_shard": 8, **options}
    with beam.Pipeline(options=PipelineOptions([LOCAL[0], *(flags or HERE)])) as pipeline:
        _ = pipeline | beam.Create(elements) | WriteShards(str(output), **options)
    return files_of(output)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return written(tmp_path_factory.mktemp("expected"), raws(), split_of=split_of)


@pytest.mark.parametrize(
    "flags",
    [
        LOCAL,
        pytest.param(["--runner=BundleBasedDirectRunner"], marks=pytest.mark.slow),
        pytest.param(
            ["--direct_running_mode=multi_processing", "--direct_num_workers=2"],
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(flags, marks=pytest.mark.nightly, id=flags[0])
            for flags in (runners.PRISM, runners.FLINK, runners.SPARK)
        ),
    ],
)
def test_neither_order_nor_units_nor_bundles_nor_the_runner_decide_a_byte(
    flags, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(write_shards, "ROWS_PER_UNIT", 100)
    elements = [raws()[number] for number in np.random.default_rng(5).permutation(40)]
    assert written(tmp_path, elements, *flags, split_of=split_of) == expected
    manifest = verified(tmp_path)
    stored = samples_of(tmp_path, manifest, "train") | samples_of(tmp_path, manifest, "val")
    assert sorted(stored) == [raw.key for raw in raws()]
    assert stored["photo/001"] == {
        "jpg": image_bytes(1, "jpg"),
        "cls": b"1",
        "txt": b"number 1",
        "json": b'{"number": 1}',
    }
    assert sorted(samples_of(tmp_path, manifest, "val")) == [
        f"photo/{n:03d}" for n in (7, 17, 27, 37)
    ]


def test_units_without_samples_are_there_too(expected, tmp_path, monkeypatch):
    monkeypatch.setattr(write_shards, "ROWS_PER_UNIT", 1)
    tars = written(tmp_path, raws(), split_of=split_of)
    assert {name: tars[name] for name in tars if name.endswith(".tar")} == {
        name: expected[name] for name in expected if name.endswith(".tar")
    }


def test_the_pipeline_goes_on_with_the_digest_once_the_set_is_there(tmp_path):
    with beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner"])) as pipeline:
        digest = pipeline | beam.Create(raws()) | WriteShards(str(tmp_path))
        assert_that(digest | beam.Map(lambda it: it == manifest_of(tmp_path).digest), equal_to([1]))


@pytest.mark.parametrize(
    "make",
    [
        Row._asdict,
        lambda row: row,
        lambda row: beam.Row(**row._asdict() | {"picture": beam.Row(**row.picture)}),
    ],
    ids=["dict", "named_tuple", "row"],
)
def test_columns_say_what_is_where_in_records_of_any_kind(make, tmp_path):
    rows = [
        make(Row(f"{number}", {"bytes": image_bytes(number)}, "cat" if number % 2 else "dog", part))
        for number, part in enumerate(["train", "train", "test"])
    ]
    written(tmp_path, rows, columns=COLUMNS | {"txt": "kind"}, classes=["dog", "cat"])
    manifest = verified(tmp_path)
    assert [info.name for info in manifest.classes] == ["dog", "cat"]
    assert samples_of(tmp_path, manifest, "test") == {
        "2": {"png": image_bytes(2), "cls": b"0", "txt": b"dog"}
    }


def test_fields_that_are_none_and_samples_without_image_or_label_are_as_they_are(tmp_path):
    elements = [Raw("a", fields={"txt": "words", "json": None, "bin": b"\0"})]
    written(tmp_path, elements)
    assert samples_of(tmp_path, manifest_of(tmp_path), "train") == {
        "a": {"txt": b"words", "bin": b"\0"}
    }


def test_elements_of_windows_are_one_set(expected, tmp_path):
    with beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner"])) as pipeline:
        _ = (
            pipeline
            | beam.Create(list(enumerate(raws())))
            | beam.MapTuple(lambda number, raw: TimestampedValue(raw, number))
            | beam.WindowInto(FixedWindows(10))
            | WriteShards(str(tmp_path), samples_per_shard=8, split_of=split_of)
        )
    assert files_of(tmp_path) == expected


def test_a_holdout_and_the_options_of_images_are_those_of_a_build(tmp_path):
    options = {"holdout": {"test": 0.25}, "resize_shorter": 4, "image_format": "png", "seed": 3}
    written(tmp_path, raws(), **options)
    manifest = verified(tmp_path)
    assert {*manifest.splits} == {"train", "test"}
    assert manifest.provenance.options["image"]["resize_shorter"] == 4
    assert {*samples_of(tmp_path, manifest, "train")["photo/000"]} == {"png", "cls", "txt", "json"}


def test_the_counters_of_the_runner_are_those_of_a_build(tmp_path):
    clear = encode(np.zeros((8, 8, 4), np.uint8), "PNG")
    pipeline = beam.Pipeline(options=PipelineOptions(LOCAL))
    elements = [*raws(), Raw("broken", b"no image"), Raw("clear", clear)]
    _ = pipeline | beam.Create(elements) | WriteShards(str(tmp_path), samples_per_shard=8)
    counters = counters_of(pipeline.run().metrics().query()["counters"])
    assert counters.pop("bytes_written") > 41 * 1024
    assert counters == {
        "samples_indexed": 41,
        "samples_quarantined": 1,
        "fixed_transparent": 1,
        "samples_written": 41,
        "shards_written": 6,
    }


def test_a_broken_image_is_in_quarantine_and_too_many_are_an_error(tmp_path):
    broken = [Raw("broken", b"no image", 0), Raw("cut", image_bytes(1, "jpg", width=64)[:-500], 0)]
    written(tmp_path / "few", [*raws(), *broken])
    assert [line["name"] for line in quarantined(tmp_path / "few")] == ["broken", "cut"]
    with pytest.raises(TooManyBad, match="2 of 2 raw samples are bad"):
        written(tmp_path / "all", broken)
    assert not (tmp_path / "all" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("elements", "options", "message"),
    [
        (raws([1, 2, 3, 2]), {}, r"several samples have the key 'photo/002'; give each its own"),
        ([("a", b"")], {}, "an element is of type tuple, expected shardset.Raw, or columns"),
        ([wrong(7, b"")], {}, "a sample has the key 7 and the split 'train', expected"),
        ([Raw("a")], {"split_of": lambda _: None}, "the key 'a' and the split None, expected"),
        ([wrong("a", "path.jpg")], {}, "a: its image is of type str, expected the bytes"),
        ([Raw("a", None, "cat")], {"classes": ["dog"]}, "its label is 'cat', expected a number"),
        ([Raw("a", None, 0, {"json": {1, 2}})], {}, "a: field json is of type set, expected bytes"),
        ([Raw("a", None, 0, {"TXT": "a"})], {}, "field 'TXT' can't be an extension"),
        ([{"id": 1}], {"columns": {"key": "name"}}, "no column 'name', only id; correct"),
        ([Raw("a")], {"split_of": lambda _: "my split"}, "'my split' can't name a split"),
        ([], {}, "no sample found"),
    ],
)
def test_what_is_wrong_with_an_element_is_said_and_nothing_is_published(
    elements, options, message, tmp_path
):
    with pytest.raises(SourceError, match=message):
        written(tmp_path, elements, **options)
    assert not [*tmp_path.rglob("manifest.json"), *tmp_path.rglob("*.tar")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples_per_shard": 0}, "samples_per_shard is 0, expected"),
        ({"samples": 3}, "no setting 'samples'"),
        ({"class_depth": 2}, "--class-depth has no meaning for beam, only for folder"),
        ({"append": True}, "manifest"),
        ({"split_of": split_of, "columns": {"split": "part"}}, "say the same; give one of them"),
    ],
)
def test_options_that_can_not_be_are_refused_where_the_transform_is_made(
    options, message, tmp_path
):
    with pytest.raises(ConfigError, match=message):
        WriteShards(str(tmp_path), **options)


def test_an_append_skips_the_keys_that_the_set_has_or_stores_them_again(tmp_path):
    written(tmp_path, raws(range(20)), samples_per_shard=10)
    written(tmp_path, raws(range(30)), samples_per_shard=10, append=True)
    manifest = verified(tmp_path)
    assert (manifest.number, manifest.splits["train"].num_samples) == (2, 30)
    written(tmp_path, raws(range(10)), samples_per_shard=10, append="store")
    assert verified(tmp_path).splits["train"].num_samples == 40


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A set of which a job wrote one shard before it failed."""
    work, left = WriteShard.work, [1]

    def write_first(self, *args):
        if not left:
            raise OSError("the worker is gone")
        left.pop()
        return work(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(WriteShard, "work", write_first)
        with pytest.raises(OSError, match="the worker is gone"):
            written(tmp_path, raws(), *flags_of("nightly"), split_of=split_of)
    assert len([*tmp_path.rglob("*.tar")]) == 1
    return tmp_path


def flags_of(job: str) -> list[str]:
    return [*LOCAL, f"--job_name={job}"]


def test_a_job_of_the_same_name_goes_on_with_its_shards(stopped, expected):
    [tar] = stopped.rglob("*.tar")
    before = tar.stat().st_mtime_ns
    assert written(stopped, raws(), *flags_of("nightly"), split_of=split_of) == expected
    assert tar.stat().st_mtime_ns == before


def test_a_job_of_the_same_name_with_other_images_is_refused(stopped):
    others = [raw._replace(image=image_bytes(0, "png")) for raw in raws()]
    with pytest.raises(ChangedInput, match="began it with other samples; give this one another"):
        written(stopped, others, *flags_of("nightly"), split_of=split_of)


def test_another_job_does_not_go_on_with_it_but_may_start_over(stopped, expected):
    with pytest.raises(ConfigError, match="already holds an unfinished build"):
        written(stopped, raws(), *flags_of("other"), split_of=split_of)
    again = written(stopped, raws(), *flags_of("other"), split_of=split_of, overwrite=True)
    assert again == expected


def test_a_bundle_that_fails_leaves_no_file_of_its_images(tmp_path):
    big = [raw._replace(fields={"bin": bytes(5000)}) for raw in raws()]
    with pytest.raises(SourceError):
        written(tmp_path, [*big, wrong("z", "path.jpg")])
    assert not [*(tmp_path / paths.PLAN).parent.rglob("*.bin")]


PROGRAM = """
import resource, sys
import apache_beam as beam
import numpy as np
from pipelines import WriteShards
from shardset import Raw

def images(num_bytes):
    noise = np.random.default_rng(0).bytes(1 << 20)
    head = b"P6 512 682 255\\n"
    for number in range(num_bytes >> 20):
        pixels = noise[number:] + noise[:number]
        yield Raw(f"{number}", head + pixels[: 512 * 682 * 3])

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

before = peak()
with beam.Pipeline(argv=["--runner=FnApiRunner"]) as pipeline:
    elements = pipeline | beam.Create([int(sys.argv[2])]) | beam.FlatMap(images)
    _ = elements | WriteShards(sys.argv[1], verify="none", samples_per_shard=64)
print(peak() - before)
"""


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_bytes_of_a_bundle(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(1 << 30)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) < 200 << 20
