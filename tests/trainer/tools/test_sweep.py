import json
import resource
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.errors import ConfigError
from shardset.program import FAILED, OK, USAGE
from tests.makers.training import shard_set, tiny_config
from trainer import cli as command
from trainer.tools.sweep import (
    FILES,
    SweepResult,
    SweepRun,
    check,
    effects,
    facts_of,
    label_of,
    measure,
    open_stream,
    page,
    parse_axes,
    plot,
    points_of,
    summary,
    sweep,
    table,
)

SETTINGS = ("image.size=8", "image.train_crop=pad", "image.eval_resize=8")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shard_set(tmp_path_factory.mktemp("set"))


@pytest.fixture
def config(manifest, tmp_path):
    return tiny_config(manifest, tmp_path)


def measured(point, *rates):
    return SweepResult(
        point=point, memory_bytes=2**20, runs=[SweepRun(rate=rate, cpu=1.0, first_s=0.1, epochs=0.5) for rate in rates]
    )


def test_axes_are_read_and_every_combination_is_a_point():
    axes = parse_axes(["q=4,8", "shard=gs://a/b,c", "w=0"])
    assert axes == {"q": [4, 8], "shard": ["gs://a/b", "c"], "w": [0]}
    assert points_of(axes) == [
        {"q": q, "shard": shard, "w": 0} for q in (4, 8) for shard in ("gs://a/b", "c")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["thread=1"], "no axis 'thread', did you mean 'threads'"),
        (["x=1"], "there are shard, q, w, L, threads, batch"),
        (["q"], "expected AXIS=VALUE,VALUE"),
        (["q=4", "q=8"], "once for each axis"),
        (["q=4,4"], "a value is given twice"),
        (["q=0"], "'0' is not a whole number from 1"),
        (["w=-1"], "'-1' is not a whole number from 0"),
        (["batch=4,"], "'' is not a whole number"),
        (["threads=٣"], "is not a whole number"),
        (["shard=a,"], "an empty name"),
    ],
)
def test_axes_that_are_none_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_axes(words)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["q", "w", "threads"]), st.sets(st.integers(1, 9), min_size=1), min_size=1))
def test_points_are_the_whole_grid_once(axes):
    points = points_of({axis: sorted(values) for axis, values in axes.items()})
    size = 1
    for values in axes.values():
        size *= len(values)
    assert len({tuple(point.items()) for point in points}) == len(points) == size


def test_a_point_changes_what_it_names_and_nothing_else(config):
    stream = open_stream(config, {"q": 3, "w": 5, "L": 4, "threads": 1, "batch": 16})
    assert (stream.order.block_size, stream.order.window, stream.order.num_lanes) == (3, 5, 4)
    assert (stream.spec.num_threads, stream.batch_size, stream.spec.seed) == (1, 16, config.seed)
    assert open_stream(config, {}).order.global_batch_size == config.global_batch_size
    assert open_stream(replace(config, budget_bytes=1 << 25), {}).memory.budget == 1 << 25


def test_a_shard_set_can_be_a_value(config, manifest):
    stream = open_stream(replace(config, manifest=None), {"shard": manifest})
    assert stream.split.num_samples == 52


def test_a_run_counts_what_it_read_after_the_first_batch(config):
    ticks = iter([10.0, 12.0, 12.5, 13.0, 14.5, 15.0])
    run = measure(open_stream(config, {}), 2.0, clock=lambda: next(ticks))
    # Opened at 10, first batch at 12; then batches of 8 until 14: begun at 12.5 and 13.0, ended at 15.0.
    assert (run.first_s, run.rate) == (2.0, 16 / 3.0)
    assert run.epochs == 24 / 52


def test_a_run_is_at_least_one_batch_long_and_goes_on_over_epochs(config):
    assert measure(open_stream(config, {}), 1e-9).epochs == 16 / 52
    ticks = iter(range(100))
    assert measure(open_stream(config, {}), 20.0, clock=lambda: next(ticks)).epochs > 2


def test_a_sweep_runs_every_point_once_a_round_and_says_how_far_it_is(config):
    said = []
    found = sweep(config, parse_axes(["threads=1,2", "batch=4,8"]), seconds=0.01, rounds=3, log=said.append)
    assert [one.point for one in found] == points_of({"threads": [1, 2], "batch": [4, 8]})
    assert {len(one.runs) for one in found} == {3}
    assert all(run.rate > 0 and run.cpu >= 0 and run.first_s > 0 for one in found for run in one.runs)
    assert "4 points x 3 rounds" in said[0]
    assert said[-1].startswith("12 of 12, 0 s left: threads=2, batch=8: ")  # the third round goes forwards


def test_the_second_round_goes_backwards(config):
    said = []
    sweep(config, parse_axes(["threads=1,2"]), seconds=0.01, rounds=2, log=said.append)
    assert [line.partition("threads=")[2][0] for line in said[1:]] == ["1", "2", "2", "1"]


def test_a_point_that_can_t_be_is_refused_before_anything_is_measured(config):
    said = []
    with pytest.raises(ConfigError, match=r"^L=5, batch=8: a global batch of 8 is not a multiple of 5 lanes"):
        sweep(config, parse_axes(["L=4,5", "batch=8"]), seconds=60, rounds=3, log=said.append)
    assert said == []


@pytest.mark.parametrize(
    ("changes", "axes", "message"),
    [
        ({"manifest": None, "fake_data": True}, {"q": [4]}, "nothing to sweep"),
        ({"manifest": None}, {"q": [4]}, "name the shard set with --manifest"),
        ({}, {"shard": ["a", "b"]}, "and not both"),
        ({"cache_dir": "/cache", "cache_bytes": 1 << 30}, {"q": [4]}, "can't use the disk cache"),
    ],
)
def test_what_would_falsify_a_sweep_is_refused(config, changes, axes, message):
    with pytest.raises(ConfigError, match=message):
        check(replace(config, **changes), axes)


def test_effects_compare_a_value_with_the_first_all_else_alike():
    rates = {(1, 4): 100, (1, 8): 200, (2, 4): 150, (2, 8): 300}
    found = [measured({"threads": threads, "q": q}, rate) for (threads, q), rate in rates.items()]
    assert effects(found)["threads"] == pytest.approx({1: 1.0, 2: 1.5})
    assert effects(found)["q"] == pytest.approx({4: 1.0, 8: 2.0})
    assert summary(found)[:3] == [
        "fastest: threads=2, q=8: 300 samples/s",
        "threads, times the rate of 1, all else alike: 2: 1.50",
        "q, times the rate of 4, all else alike: 8: 2.00",
    ]


def test_the_table_has_medians_and_spreads():
    lines = table([measured({"q": 4}, 100, 400, 150), measured({"q": 8}, 10, 30, 20)]).splitlines()
    assert lines[0].startswith("| q | samples/s | slowest to fastest |")
    assert lines[2].startswith("| 4 | 150 | 100 to 400 | 1.000 | 0.10 | 0.50 | 1 |")
    assert lines[3].startswith("| 8 | 20 | 10 to 30 |")
    assert len({line.count("|") for line in lines}) == 1


def test_the_plot_is_xml_with_a_bar_a_point_as_long_as_its_rate():
    found = [measured({"shard": "<a&b>"}, 100), measured({"shard": "c"}, 50, 25, 75)]
    tree = ElementTree.fromstring(plot(found))
    widths = [float(one.get("width")) for one in tree.iterfind("{*}rect") if one.get("fill") == "#2b6cb0"]
    assert widths[0] == pytest.approx(2 * widths[1])
    assert "shard=<a&b>" in [one.text for one in tree.iterfind("{*}text")]
    spans = [float(one.get("x2")) - float(one.get("x1")) for one in tree.iterfind("{*}line")]
    assert spans == pytest.approx([0, widths[0] / 2], abs=0.2)


def test_the_page_says_when_data_was_read_twice(config):
    again = SweepResult(point={"q": 4}, memory_bytes=1, runs=[SweepRun(rate=1.0, cpu=1.0, first_s=1.0, epochs=1.5)])
    facts = facts_of(config, {"q": [4]}, seconds=3, rounds=1)
    assert "read the split more than once" in page([again], facts)
    assert "read the split more than once" not in page([measured({"q": 4}, 1)], facts)
    assert "batch: 8" in page([again], facts)
    assert "batch: 8" not in page([again], facts_of(config, {"batch": [4]}, seconds=3, rounds=1))


def arguments(manifest: str, *words: str) -> list[str]:
    fixed = ["--manifest", manifest, "--global-batch-size", "8", *(f"--set={setting}" for setting in SETTINGS)]
    return ["bench-input", *fixed, "--sweep", *words]


def test_the_command_writes_a_table_a_plot_and_its_numbers(manifest, tmp_path, capsys):
    output = tmp_path / "deep" / "sweep"
    words = arguments(manifest, "q=4,8", "threads=1")
    assert command.main([*words, "--seconds", "0.01", "--rounds", "2", "--output", str(output)]) == OK
    printed = capsys.readouterr()
    assert printed.out.startswith("| q | threads | samples/s |")
    assert "4 of 4, 0 s left" in printed.err
    assert sorted(path.name for path in output.iterdir()) == sorted(FILES)
    values = json.loads((output / "sweep.json").read_text())
    assert [len(point["runs"]) for point in values["points"]] == [2, 2]
    assert values["facts"]["method"] == "median of 2 rounds of 0.01 s, interleaved"
    assert "![samples a second](sweep.svg)" in (output / "sweep.md").read_text()
    ElementTree.parse(output / "sweep.svg")


def test_json_on_standard_output_is_nothing_but_json(manifest, capsys):
    assert command.main([*arguments(manifest, "q=4"), "--seconds", "0.01", "--rounds", "1", "--json"]) == OK
    assert label_of(json.loads(capsys.readouterr().out)["points"][0]["point"]) == "q=4"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sweep", "thread=1"], "did you mean 'threads'"),
        (["--sweep", "q=4", "--seconds", "0"], "--seconds is 0"),
        (["--sweep", "q=4", "--seconds", "nan"], "--seconds is nan"),
        (["--sweep", "q=4", "--rounds", "0"], "--rounds is 0"),
        (["--sweep", "q=4", "--output", "gs://b/x"], "--output gs://b/x: expected a local folder"),
        (["--sweep", "q=4", "--output", "~/x"], "~ is not your home folder here"),
        (["--rounds", "2"], "--rounds goes with --sweep"),
        (["--output", "x"], "--output goes with --sweep"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_a_usage_error(manifest, flags, message, capsys):
    assert command.main(["bench-input", "--manifest", manifest, *flags]) == USAGE
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def test_what_was_measured_is_printed_though_the_disk_does_not_take_it(manifest, tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        words = arguments(manifest, "q=4", "--seconds", "0.01", "--rounds", "1", "--output", str(tmp_path))
        assert command.main(words) == FAILED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    printed = capsys.readouterr()
    assert "fastest: q=4" in printed.out
    assert printed.err.splitlines()[-1].startswith(f"StorageError: {tmp_path}/sweep.json: the file is larger than")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_a_sweep_is_not_overwritten(manifest, tmp_path, capsys):
    (tmp_path / "sweep.json").write_text("{}")
    assert command.main([*arguments(manifest, "q=4"), "--output", str(tmp_path)]) == USAGE
    assert "it holds a sweep already" in capsys.readouterr().err
    assert (tmp_path / "sweep.json").read_text() == "{}"


def test_a_shard_set_that_is_not_there_is_a_failure(tmp_path: Path, capsys):
    assert command.main(["bench-input", "--sweep", f"shard={tmp_path}/none"]) == FAILED
    assert "no manifest there" in capsys.readouterr().err


def test_axes_may_be_given_one_at_a_time():
    words = ["bench-input", "--sweep", "q=4,8", "w=0", "--sweep", "threads=1,2"]
    assert command.parser().parse_args(words).sweep == ["q=4,8", "w=0", "threads=1,2"]
