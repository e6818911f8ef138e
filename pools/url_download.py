"""One file behind a plain URL, with resume: what an earlier try left is asked for no second time, if the server plays along."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pools.download_reach import CheckedHttp, CheckedHttps
from pools.errors import DownloadFailed, HubFileUnknown
from pools.model_reference import without_query

BytesDone = Callable[[int], None]

TIMEOUT_S = 30.0
CHUNK_BYTES = 1 << 20
TRIES = 5


@dataclass(frozen=True)
class UrlFile:
    """What the server says of a file: its size, and a validator that changes when the file does ("": it names none)."""

    url: str
    size_bytes: int
    validator: str


class _SameKind(urllib.request.HTTPRedirectHandler):
    """Follows redirects over HTTP only, and from HTTPS to nothing less."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        allowed = ("https://",) if req.full_url.startswith("https://") else ("https://", "http://")
        if not newurl.lower().startswith(allowed):
            raise urllib.error.URLError(f"it redirects to {without_query(newurl)!r}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_opener = urllib.request.build_opener(_SameKind, CheckedHttp, CheckedHttps)


def look_up(url: str) -> UrlFile:
    """Asks for the file without fetching it. Raises HubFileUnknown, DownloadFailed, DownloadRefused."""
    with _open(urllib.request.Request(url, method="HEAD"), url) as answer:
        length = answer.headers.get("Content-Length", "")
        # A weak validator cannot promise that the bytes are the same.
        tag = answer.headers.get("ETag", "")
        validator = "" if tag.startswith("W/") else tag or answer.headers.get("Last-Modified", "")
    if not length.isdecimal() or not int(length):
        raise DownloadFailed(f"{without_query(url)} does not tell its size")
    return UrlFile(url, int(length), validator)


def fetch(file: UrlFile, partial: Path, on_bytes: BytesDone) -> None:
    """Fetches the file to `partial`, going on where that ends. Raises DownloadFailed once TRIES in a row brought nothing."""
    failures = 0
    while (done := _size(partial)) < file.size_bytes:
        try:
            _fetch_rest(file, partial, on_bytes)
        except DownloadFailed:
            failures = 0 if _size(partial) > done else failures + 1
            if failures >= TRIES:
                raise
    if _size(partial) != file.size_bytes:
        partial.unlink()
        raise DownloadFailed(f"{without_query(file.url)} brought other than {file.size_bytes:,} bytes")


def _fetch_rest(file: UrlFile, partial: Path, on_bytes: BytesDone) -> None:
    done = _size(partial) if file.validator else 0
    request = urllib.request.Request(file.url)
    if done:
        request.add_header("Range", f"bytes={done}-")
        request.add_header("If-Range", file.validator)
    with _open(request, file.url) as answer, partial.open("ab") as target:
        if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
            done = 0  # the whole file, whatever was asked for
            target.truncate(0)
        on_bytes(done)
        try:
            while done < file.size_bytes and (chunk := answer.read(min(CHUNK_BYTES, file.size_bytes - done))):
                target.write(chunk)
                done += len(chunk)
                on_bytes(done)
        except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
            raise DownloadFailed(f"{without_query(file.url)} broke off: {error!r}") from error
    if done < file.size_bytes:
        raise DownloadFailed(f"{without_query(file.url)} broke off after {done:,} of {file.size_bytes:,} bytes")


def _open(request: urllib.request.Request, url: str) -> http.client.HTTPResponse:
    named = without_query(url)
    try:
        answer: http.client.HTTPResponse = _opener.open(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (404, 410):
            raise HubFileUnknown(f"there is no {named}") from None
        raise DownloadFailed(f"{named} was answered with {error.code}") from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise DownloadFailed(f"{named} cannot be reached: {error}") from error
    return answer


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
