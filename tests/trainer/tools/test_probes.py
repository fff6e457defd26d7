"""What the doctor sees of a machine, from real servers, files and processes."""

import socket

import pytest
import torch

from shardset.errors import ConfigError, NotFound, StorageError, TransientError
from tests.makers.ports import free_port
from tests.makers.training import shard_set, tiny_config
from tests.makers.web import WebServer
from trainer.runtime import machine
from trainer.tools import probes

ENDPOINTS = "t1v-n-0:uid0:10.130.0.10,t1v-n-1:uid1:10.130.0.11"


@pytest.fixture
def metadata(tmp_path):
    """A server with the files of Google's metadata server, but without its header."""
    place = tmp_path / "computeMetadata/v1/instance/attributes"
    place.mkdir(parents=True)
    (place / "worker-network-endpoints").write_text(ENDPOINTS)
    (place / "agent-worker-number").write_text("1")
    (place.parent / "zone").write_text("projects/1/zones/us-central2-b")
    with WebServer(tmp_path) as server:
        yield server


def test_zone_and_workers_come_from_the_metadata_server(metadata, monkeypatch):
    metadata.changed = {"Metadata-Flavor": "Google"}
    monkeypatch.setenv("GCE_METADATA_HOST", metadata.url.removeprefix("http://"))
    assert probes.zone() == "us-central2-b"
    assert machine.tpu_workers() == (["10.130.0.10", "10.130.0.11"], 1)
    assert machine.metadata("attributes/nothing") is None


def test_without_googles_metadata_server_nothing_is_known(metadata, monkeypatch):
    for address in (metadata.url.removeprefix("http://"), f"127.0.0.1:{free_port()}"):
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        assert probes.zone() is None
        assert machine.tpu_workers() == ([], 0)


def test_open_ports_closed_ones_and_unknown_hosts_are_told_apart():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        opened, closed = listening.getsockname()[1], free_port()
        assert probes.ports(["127.0.0.1"], [opened, closed]) == {
            f"127.0.0.1:{opened}": "open",
            f"127.0.0.1:{closed}": "closed",
        }
    assert probes.ports(["no-such-host.invalid"], [8471], timeout_s=0.2) == {
        "no-such-host.invalid:8471": "filtered"
    }
    assert probes.ports([], [8471]) == {}


def test_a_port_that_swallows_connections_is_filtered():
    # A queue of no length that is full: the system lets further connections wait without an answer.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        kept = [socket.create_connection(("127.0.0.1", port))]
        assert probes.ports(["127.0.0.1"], [port], timeout_s=0.2) == {
            f"127.0.0.1:{port}": "filtered"
        }
        for each in kept:
            each.close()


def test_a_run_folder_is_written_and_left_as_it_was(tmp_path):
    probes.try_writing(str(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []
    probes.try_writing("memory://probe/run")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="expected folders"):
        probes.try_writing(str(tmp_path / "file" / "run"))
    with pytest.raises(ConfigError, match="not known"):
        probes.try_writing("abfs://bucket/run")


@pytest.mark.gcs
def test_a_bucket_says_where_it_is_or_why_not(gcs_root, monkeypatch):
    assert isinstance(probes.bucket_location("bucket"), str)
    assert isinstance(probes.bucket_location("no-such-bucket"), NotFound)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{free_port()}")
    assert isinstance(probes.bucket_location("bucket", timeout_s=0.5), TransientError)


def test_devices_that_do_not_come_up_are_given_up():
    assert probes.devices("single", timeout_s=0.01) == "the devices did not come up within 0 s"


@pytest.mark.slow
def test_devices_that_fail_give_the_last_line_of_why(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    found = probes.devices("ddp")
    assert isinstance(found, str)
    assert "torchrun" in found


def test_versions_are_those_of_the_installed_distributions():
    found = probes.versions()
    assert list(found) == list(probes.DISTRIBUTIONS)
    assert (found["torch"] or "").partition("+")[0] == torch.__version__.partition("+")[0]


def test_decoding_is_measured_on_real_images(tmp_path):
    assert probes.decode_rate(tiny_config(shard_set(tmp_path / "set"), tmp_path / "run")) > 0
