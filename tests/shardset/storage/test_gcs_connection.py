"""Credentials, connections and servers that never answer."""

import functools
import itertools
import json
import os
import socket
from contextlib import contextmanager
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth.exceptions import TransportError

from shardset.errors import StorageError, TransientError
from shardset.storage import gcs, gcs_http
from shardset.storage.open import open_storage
from shardset.storage.retry import RetryPolicy, while_someone_waits
from tests.faulty_proxy import Fault, FaultyProxy, in_turn, is_media
from tests.makers.objects import HELLO, in_child, names, put


@pytest.fixture
def scheme():
    return "gs"


@pytest.mark.gcs
def test_an_emulator_may_be_named_without_a_scheme(read_a, gcs_emulator, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_emulator.removeprefix("http://"))
    assert read_a() == HELLO


READ = ("nothing", repr(HELLO))
"""What `in_child` says of a good `read_a`."""


@pytest.fixture
def read_a(gcs_root):
    """Reads the object `a`, which is stored."""
    put(open_storage(gcs_root), "a")
    return lambda: open_storage(gcs_root).read("a")


class Google:
    """Credentials as Google's machines give them out: a metadata server that never answers, a token
    server.
    """

    def __init__(self, folder, emulator):
        self.silent = socket.create_server(("127.0.0.1", 0))
        self.environment = {
            # the emulator, but without its leave to come anonymously
            "API_ENDPOINT_OVERRIDE": emulator,
            "GCE_METADATA_IP": f"127.0.0.1:{self.silent.getsockname()[1]}",
            "CLOUDSDK_CONFIG": str(folder),
        }

    def prepare(self, **more):
        """In a child: this environment and no other credentials."""
        for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
            os.environ.pop(name, None)
        os.environ.update(self.environment, **more)

    def num_probes(self):
        """How often the metadata server was asked."""
        self.silent.settimeout(0.0)
        for number in itertools.count():
            try:
                self.silent.accept()[0].close()
            except BlockingIOError:
                return number


@pytest.fixture
def google(tmp_path, proxy):
    google = Google(tmp_path, proxy.url)
    yield google
    google.silent.close()


@pytest.mark.gcs
def test_without_credentials_it_is_anonymous_after_one_short_look(read_a, google, proxy):
    assert in_child(google.prepare, read_a) == READ
    assert google.num_probes() == 1
    assert "authorization" not in proxy.seen[-1].headers


@pytest.mark.gcs
def test_an_anonymous_user_who_is_refused_is_told_so(read_a, google, proxy):
    proxy.script = lambda seen: Fault("status", status=401)
    kind, text = in_child(google.prepare, read_a)
    assert kind == "StorageError"
    assert "401: an anonymous user (no Google credentials were found) may not do this" in text


@pytest.mark.gcs
@pytest.mark.parametrize("content", [None, "not json"])
def test_broken_credentials_are_an_error_and_not_anonymous(
    read_a, google, proxy, tmp_path, content
):
    proxy.seen.clear()
    path = tmp_path / "credentials.json"
    if content is not None:
        path.write_text(content)
    prepare = functools.partial(google.prepare, GOOGLE_APPLICATION_CREDENTIALS=str(path))
    kind, text = in_child(prepare, read_a)
    assert kind == "StorageError"
    assert "Google credentials are broken" in text
    assert proxy.seen == []


def service_account(path, token_uri):
    """Writes a service account's key file as Google's console does."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    facts = {
        "type": "service_account",
        "client_email": "me@project.iam.gserviceaccount.com",
        "token_uri": token_uri,
    }
    path.write_text(
        json.dumps({**facts, "private_key": pem, "private_key_id": "1", "project_id": "project"})
    )


TOKEN = b'{"access_token": "secret", "expires_in": 3600, "token_type": "Bearer"}'


@contextmanager
def token_server(*first):
    """The address of a server that answers these bytes, then a token each time."""
    bodies = itertools.chain(first, itertools.repeat(TOKEN))
    kind = (("Content-Type", "application/json"),)
    with FaultyProxy("http://nowhere") as server:
        server.script = lambda seen: Fault("status", status=200, put=next(bodies), headers=kind)
        yield server.url


@pytest.fixture
def as_service_account(google, tmp_path):
    """Runs an action in a child that has a service account's key."""

    def run(action, *first):
        with token_server(*first) as url:
            service_account(tmp_path / "key.json", f"{url}/token")
            key = str(tmp_path / "key.json")
            return in_child(
                functools.partial(google.prepare, GOOGLE_APPLICATION_CREDENTIALS=key), action
            )

    return run


@pytest.mark.gcs
def test_application_default_credentials_are_used(read_a, google, proxy, as_service_account):
    proxy.seen.clear()
    assert as_service_account(read_a, b"{}") == READ
    proxy.script = lambda seen: Fault("status", status=403)
    kind, text = as_service_account(read_a)
    assert {seen.headers["authorization"] for seen in proxy.seen} == {"Bearer secret"}
    assert kind == "StorageError"
    assert "403: me@project.iam.gserviceaccount.com may not do this" in text
    assert google.num_probes() == 0


@pytest.mark.gcs
def test_a_read_whose_token_was_refused_goes_on_with_a_new_one(read_a, proxy, as_service_account):
    proxy.script = in_turn(*[Fault("status", status=401)] * 2, when=is_media)
    assert as_service_account(read_a) == READ
    assert sum(map(is_media, proxy.seen)) == 3


@pytest.mark.gcs
def test_the_quota_project_of_the_environment_pays_for_every_request(
    behind_proxy, proxy, monkeypatch
):
    def act():
        put(behind_proxy, "a")
        assert (behind_proxy.read("a", 2, 5), names(behind_proxy)) == (HELLO[2:5], ["a"])
        behind_proxy.delete("a")

    act()
    assert not any("userProject" in seen.path for seen in proxy.seen)
    proxy.seen.clear()
    monkeypatch.setenv("GOOGLE_CLOUD_QUOTA_PROJECT", "my-project")
    act()
    assert {seen.method for seen in proxy.seen} == {"POST", "GET", "DELETE"}
    assert all("userProject=my-project" in seen.path for seen in proxy.seen)


@pytest.mark.parametrize("body", [b"", b"{}"])
def test_a_metadata_server_that_says_no_token_is_asked_again(body):
    with token_server(body) as url, pytest.raises(TransportError, match="answered with no token"):
        gcs_http._TokenRequest()(
            f"{url}/computeMetadata/v1/instance/service-accounts/default/token"
        )


@pytest.mark.gcs
@pytest.mark.parametrize("start", ["http://", ""])
def test_the_password_of_an_emulator_is_never_shown(
    behind_proxy, proxy, monkeypatch, caplog, start
):
    host = proxy.url.removeprefix("http://")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"{start}user:s3cret@{host}")
    proxy.script = in_turn(Fault("status", status=403), *[Fault("reset")] * 1000)
    with pytest.raises(
        StorageError, match=rf"403: the emulator at http://\*\*\*@{host} may not"
    ) as refused:
        behind_proxy.stat("a")
    with pytest.raises(TransientError, match="gave up after") as lost:
        behind_proxy.stat("a")
    assert "s3cret" not in f"{refused.value} {lost.value} {caplog.text}"


@pytest.mark.parametrize("variable", ["STORAGE_EMULATOR_HOST", "http_proxy"])
def test_an_address_of_a_server_that_is_none_is_named_without_its_password(variable):
    words = {
        "STORAGE_EMULATOR_HOST": "http://127.0.0.1:1",
        "no_proxy": "",
        variable: "http://user:s3cret@host:port",
    }
    kind, text = in_child(
        lambda: os.environ.update(words), lambda: open_storage("gs://bucket/x").stat("a")
    )
    assert kind == "ConfigError"
    assert "s3cret" not in text
    assert "host" in text


@pytest.mark.gcs
def test_objects_are_read_through_the_proxy_that_the_environment_names(read_a, gcs_emulator, proxy):
    def prepare():
        os.environ.update(STORAGE_EMULATOR_HOST=gcs_emulator, http_proxy=proxy.url, no_proxy="")

    assert in_child(prepare, read_a) == READ
    assert [seen.path.startswith(gcs_emulator) for seen in proxy.seen if is_media(seen)] == [True]


def test_certificates_are_checked_as_requests_does(monkeypatch, tmp_path):
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    assert gcs_http._connect(f"https://{tmp_path.name}")[0].verify is True
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "own.pem"))
    assert gcs_http._connect(f"https://{tmp_path.name}-2")[0].verify == str(tmp_path / "own.pem")


@pytest.fixture
def black_hole(monkeypatch):
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


@pytest.mark.parametrize("is_listening", [True, False])
def test_an_operation_ends_at_its_deadline_and_says_before_that_what_fails(
    black_hole, monkeypatch, caplog, is_listening
):
    if not is_listening:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    policy = RetryPolicy(stall_timeout_s=0.3, deadline_s=1.0, warn_after_s=0.0)
    with pytest.raises(
        TransientError, match=r"gs://bucket/a: .*gave up after [234] tries in [012] s"
    ):
        replace(open_storage("gs://bucket"), retry=policy).stat("a")
    [said] = [
        record.getMessage() for record in caplog.records if record.name.startswith("shardset")
    ]
    assert said.startswith("gs://bucket/a: ")
    assert said.endswith("; trying again for 1 s in all")


def test_storages_are_patient_unless_someone_waits():
    with while_someone_waits():
        assert gcs.GcsStorage("bucket").retry.deadline_s == 30
    assert gcs.GcsStorage("bucket").retry == RetryPolicy()
