"""A web server for one folder: ranges, strong ETags, If-Match, redirects, a header that it wants to
see.
"""

import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


class WebServer(ThreadingHTTPServer):
    """Serves the files of `folder` while the `with` block runs; `seen` holds (path, headers) of
    each request.
    """

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.seen = Path(folder), []
        self.has_ranges, self.has_etags = True, True
        self.changed = {}  # headers of answers; None leaves one out
        self.wanted = {}  # headers without which it answers 401
        self.redirect_to = None  # to where a first request is sent on

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: WebServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        """Silent: `seen` is the log."""

    def do_GET(self):
        server = self.server
        server.seen.append((self.path, dict(self.headers.items())))
        if server.redirect_to:
            return self._answer(
                302, {"Location": f"{server.redirect_to}{self.path}?signature=abc"}, b"moved"
            )
        if any(self.headers.get(name) != value for name, value in server.wanted.items()):
            return self._answer(401, {}, b"who are you?")
        try:
            data = (server.folder / unquote(self.path.partition("?")[0]).lstrip("/")).read_bytes()
        except OSError:
            return self._answer(404, {}, b"not here")
        facts = os.stat(server.folder / unquote(self.path.partition("?")[0]).lstrip("/"))
        e_tag = (
            f'"{facts.st_mtime_ns}-{facts.st_ino}"' if server.has_etags else f'W/"{facts.st_size}"'
        )
        headers = {"ETag": e_tag, "Last-Modified": f"{facts.st_mtime_ns}"}
        if self.headers.get("If-Match", e_tag) != e_tag:
            return self._answer(412, headers, b"another one")
        wanted = self.headers.get("Range")
        if wanted is None or not server.has_ranges:
            return self._answer(200, headers, data)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last or len(data)) + 1, len(data))
        if start >= len(data):
            return self._answer(416, {"Content-Range": f"bytes */{len(data)}"}, b"")
        span = f"bytes {start}-{stop - 1}/{len(data)}"
        return self._answer(206, headers | {"Content-Range": span}, data[start:stop])

    def _answer(self, status, headers, body):
        self.send_response_only(status)
        for name, value in {
            **headers,
            "Content-Length": str(len(body)),
            **self.server.changed,
        }.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
