"""A hub on loopback that speaks Hugging Face's wire: files with commit, size and SHA-256, and ranges. Breaks on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+).*")


@dataclass
class LocalHub:
    """Use as a context manager; `files` maps (repository, file) to content.

    `breaks` is how many answers end after `break_after_bytes`; `told_sha256` overrides what is told of a file's digest;
    behind `stall_after_bytes` nothing comes until that is 0 again. `asked` collects (method, path, range).
    """

    files: dict[tuple[str, str], bytes] = field(default_factory=dict)
    breaks: int = 0
    break_after_bytes: int = 0
    stall_after_bytes: int = 0
    told_sha256: str = ""
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    def __enter__(self) -> LocalHub:
        self.closing = threading.Event()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def gets(self, file: str) -> list[str]:
        """The ranges with which a file's bytes were asked for."""
        return [asked_range for method, path, asked_range in self.asked if method == "GET" and path.endswith(file)]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: LocalHub) -> None:
        self.hub = hub
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    @property
    def hub(self) -> LocalHub:
        return self.server.hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        known = any(repo in path for repo, _ in self.hub.files)
        if (match := _TREE.fullmatch(path)) and with_body and known:
            self._tree(match["repo"])
        elif (match := _RESOLVE.fullmatch(path)) and (match["repo"], match["file"]) in self.hub.files:
            self._file(self.hub.files[match["repo"], match["file"]], with_body=with_body)
        else:
            self._head(404, {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound", "Content-Length": "0"})

    def _tree(self, repo: str) -> None:
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
            for (owner, name), content in self.hub.files.items()
            if owner == repo
        ]
        body = json.dumps(entries).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _file(self, content: bytes, *, with_body: bool) -> None:
        digest = self.hub.told_sha256 or hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        start = 0
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted:
            start = int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._head(206 if wanted else 200, {**headers, "Content-Length": str(len(content) - start)})
        if with_body:
            self._body(content[start:])

    def _body(self, content: bytes) -> None:
        end = len(content)
        if self.hub.breaks:
            self.hub.breaks -= 1
            end = min(end, self.hub.break_after_bytes)
        for offset in range(0, end, 65536):
            while 0 < self.hub.stall_after_bytes <= offset and not self.hub.closing.wait(0.02):
                pass
            self.wfile.write(content[offset : min(offset + 65536, end)])
        if end < len(content):
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, ValueError):  # a client that went, or an answer that broke off on purpose
            return
