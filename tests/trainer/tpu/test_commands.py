"""Command lines are checked by the stand-in's reading of gcloud's reference."""

import contextlib
import io
import itertools
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.errors import ConfigError
from tests.trainer.tpu.fake_gcloud import Refused, parsed
from trainer.tpu import commands
from trainer.tpu.commands import TpuNode, TpuRequest
from trainer.tpu.gcloud import DryRunner

NODE = TpuNode(name="my-tpu", zone="us-central2-b", project="my-project-1")


def every_command(request: TpuRequest, script: str) -> list[commands.Command]:
    node, environment = request.node, commands.environment_of([])
    run_dir = "gs://bucket/run"
    return [
        commands.describe(node),
        commands.describe_request(node),
        commands.create(request),
        commands.delete(node),
        commands.delete_request(node),
        *commands.remaining(node, run_dir).values(),
        commands.copy_wheel(node, Path("dist") / commands.WHEEL),
        commands.install(node),
        commands.doctor(node, ["--manifest=gs://bucket/set"], environment),
        commands.train(node, ["--set=image.size=224"], environment),
        commands.stop(node),
        commands.fetch_log(node, 3, Path("tpu-logs/3.log")),
        commands.upload_logs([Path("tpu-logs/3.log")], run_dir, node.project),
    ]


@pytest.mark.parametrize(("queued", "spot", "everything"), itertools.product([True, False], repeat=3))
def test_every_command_has_documented_flags_only_and_all_that_it_needs(queued, spot, everything, tmp_path):
    script = tmp_path / "start.sh"
    script.write_text("true")
    node = TpuNode(
        name="t", zone="europe-west4-a", project="my-project-1" if everything else None, internal_ip=everything
    )
    more = {"startup_script": str(script), "network": "n", "subnetwork": "s", "service_account": "a@p.iam"}
    valid_for = {"valid_for": "6h"} if queued else {}
    request = TpuRequest(
        node=node, accelerator_type="v4-32", queued=queued, spot=spot, **(more | valid_for if everything else {})
    )
    for words in every_command(request, str(script)):
        assert words[0] == "gcloud"
        name, _, flags = parsed(list(words[1:]))
        assert ("project" in flags) is everything, name


def test_the_stand_in_refuses_what_is_not_documented():
    for line in (
        "compute tpus tpu-vm create t --zone=z --version=v --accelerator-type=v4-8 --spott",
        "compute tpus tpu-vm create t --zone=z --runtime-version=v --accelerator-type=v4-8",
        "compute tpus queued-resources create t --zone=z --version=v --accelerator-type=v4-8 --node-id=t",
        "compute tpus tpu-vm ssh t --zone=z --command=true --worker",
        "compute tpus tpu-vm delete t --quiet",
        "compute tpus tpu-vm erase t --zone=z",
        "compute tpus tpu-vm describe --zone=z",
    ):
        with pytest.raises(Refused):
            parsed(line.split())


@given(st.lists(st.text(min_size=1).filter(lambda text: "\0" not in text), max_size=4))
def test_a_command_that_is_shown_reads_back_as_the_same_words(texts):
    words = commands.train(NODE, [f"--set=a={text}" for text in texts], {"A": "b c"})
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        DryRunner(exists=True).follow(words)
    assert tuple(shlex.split(shown.getvalue())) == words


@given(st.text(min_size=1).filter(lambda text: "\0" not in text))
def test_arguments_of_the_trainer_reach_it_whole_through_the_worker_s_shell(text):
    (command,) = [word for word in commands.train(NODE, [text], {}) if word.startswith("--command=")]
    assert shlex.split(command.removeprefix("--command="))[-1] == text


@pytest.mark.parametrize(
    ("type_", "runtime"),
    [
        ("v3-32", "tpu-ubuntu2204-base"),
        ("v4-32", "tpu-ubuntu2204-base"),
        ("v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "v2-alpha-tpuv5"),
        ("v6e-8", "v2-alpha-tpuv6e"),
    ],
)
def test_each_generation_gets_the_runtime_that_google_names_for_it(type_, runtime):
    assert TpuRequest(node=NODE, accelerator_type=type_).runtime == runtime
    assert TpuRequest(node=NODE, accelerator_type=type_, runtime_version="mine").runtime == "mine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "My_TPU"}, "can't name a TPU VM"),
        ({"name": "-x"}, "can't name a TPU VM"),
        ({"name": "a" * 64}, "at most 63"),
        ({"name": "t --zone=x"}, "can't name a TPU VM"),
        ({"zone": "us-central2"}, "that is a region"),
        ({"zone": "here"}, "expected a zone"),
        ({"project": "My Project"}, "a project's id"),
    ],
)
def test_a_node_refuses_what_gcloud_would_not_take(changes, message):
    with pytest.raises(ConfigError, match=message):
        TpuNode(**({"name": "t", "zone": "us-central2-b"} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accelerator_type": "v5e-16"}, "v5litepod-16"),
        ({"accelerator_type": "v4"}, "GENERATION-SIZE"),
        ({"accelerator_type": "v4-0"}, "GENERATION-SIZE"),
        ({"valid_for": "6 hours"}, "6h"),
        ({"valid_for": "6h", "queued": False}, "--direct"),
        ({"startup_script": "/no/such/file"}, "no such file"),
    ],
)
def test_a_request_refuses_what_can_not_be_met(changes, message):
    with pytest.raises(ConfigError, match=message):
        TpuRequest(**({"node": NODE, "accelerator_type": "v4-8"} | changes))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("A", "NAME=VALUE"),
        ("1A=b", "NAME=VALUE"),
        ("A B=c", "NAME=VALUE"),
        ("XLA_USE_BF16=1", "--precision bf16"),
        ("XRT_TPU_CONFIG=localservice;0;localhost:51011", "XRT is gone"),
    ],
)
def test_variables_that_can_not_be_or_do_nothing_any_more_are_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        commands.environment_of([setting])


def test_the_device_is_named_unless_the_user_names_another():
    assert commands.environment_of(["A=b=c"]) == {"PJRT_DEVICE": "TPU", "A": "b=c"}
    assert commands.environment_of(["PJRT_DEVICE=CPU"]) == {"PJRT_DEVICE": "CPU"}


@pytest.mark.parametrize("url", ["run", "/run", "gs://", "gs:///run", "s3://bucket/run", "gs://B/run"])
def test_a_run_folder_outside_a_bucket_is_refused(url):
    with pytest.raises(ConfigError, match="gs://BUCKET/FOLDER"):
        commands.upload_logs([Path("0.log")], url, None)
