"""A server that speaks as Azure's blob storage does: azurite, by npm."""

import base64
import datetime
import hashlib
import hmac
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.makers.ports import free_port, send_when_up

REPOSITORY = Path(__file__).parent.parent.parent
PROGRAM = REPOSITORY / ".tools/azurite/node_modules/.bin/azurite-blob"
ACCOUNT = "devstoreaccount1"
# azurite's own
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CONTAINER = "container"


@contextmanager
def azurite(log: Path) -> Iterator[str]:
    """The URL of the account on a server with one empty container; all is kept in memory, as long
    as the block runs.
    """
    assert PROGRAM.exists(), "run `make azurite` first"
    port = free_port()
    url = f"http://127.0.0.1:{port}/{ACCOUNT}"
    words = [
        str(PROGRAM),
        "--inMemoryPersistence",
        "--blobPort",
        f"{port}",
        "--silent",
        "--skipApiVersionCheck",
    ]
    words += ["--disableTelemetry"]  # else it reports each start to its makers
    with (
        log.open("wb") as output,
        subprocess.Popen(words, stdout=output, stderr=output, cwd=log.parent) as server,
    ):
        try:
            send_when_up(_signed("PUT", f"{url}/{CONTAINER}?restype=container"))
            yield url
        finally:
            server.terminate()


def azure_environment(url: str) -> dict[str, str]:
    """What has a process use the account at a URL."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": url,
    }


def _signed(method: str, url: str) -> urllib.request.Request:
    """A request without a body, signed with the key of the account (Shared Key,
    service of blobs).
    """
    date = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    path, _, query = url.partition("//")[2].partition("/")[2].partition("?")
    asked = "".join(f"\n{word.replace('=', ':')}" for word in query.split("&"))
    lines = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    text = f"{method}{12 * chr(10)}{lines}/{ACCOUNT}/{path}{asked}"
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    signature = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    return urllib.request.Request(
        url, method=method, headers={**headers, "Authorization": signature}
    )
