"""Whether a whole Hydra serves: `/readyz` says so, and then one real token comes through the site.

On an address other than loopback the site asks even this machine for a key, which nobody has here; then the token is
asked of an engine itself.
"""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from engines.addresses import http_url

CHAT_PATH = "/v1/chat/completions"
POLL_S = 0.2
READY_WAIT_S = 5.0
TOKEN_WAIT_S = 120.0
MAX_ANSWER_BYTES = 1 << 20
REQUEST = {"messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 1, "temperature": 0}


class ReadinessProbe:
    """Asks a site until it has generated a token, in a thread of its own, so that its owner stays free for signals.

    `last_answer` tells in words what the site said last; `stop` ends the asking after the request in flight.
    """

    def __init__(self, site_url: str, engines_dir: Path, timeout_s: float) -> None:
        self.last_answer = "nothing yet"
        self._site_url = site_url
        self._engines_dir = engines_dir
        self._deadline = time.monotonic() + timeout_s
        self._stopped = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="readiness-probe", daemon=True)
        self._thread.start()

    def is_ready(self) -> bool:
        """Whether a token has been generated."""
        return self._ready.is_set()

    def stop(self) -> None:
        """End the asking; returns at once."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set() and time.monotonic() < self._deadline:
            if self._ask(f"{self._site_url}/readyz", None, READY_WAIT_S)[0] == 200 and self._generates():
                self._ready.set()
                return
            self._stopped.wait(POLL_S)

    def _generates(self) -> bool:
        status, answer = self._ask(f"{self._site_url}{CHAT_PATH}", REQUEST, TOKEN_WAIT_S)
        if status not in (401, 403):
            return status == 200 and bool(answer.get("choices"))
        for url, secret in self._engine_urls():
            status, answer = self._ask(f"{url}{CHAT_PATH}", REQUEST, TOKEN_WAIT_S, secret)
            if status == 200 and answer.get("choices"):
                return True
        return False

    def _engine_urls(self) -> Iterator[tuple[str, str]]:
        """Where each engine of this home listens, and the secret it asks for ("" on loopback)."""
        for path in sorted(self._engines_dir.glob("*/config.json")):
            try:
                told = json.loads(path.read_text(encoding="utf-8"))
                yield http_url(str(told["host"]), int(told["port"])), str(told.get("http_secret", ""))
            except (OSError, ValueError, KeyError, TypeError) as error:
                self.last_answer = f"{path}: {error}"

    def _ask(self, url: str, body: object | None, wait_s: float, secret: str = "") -> tuple[int, dict[str, object]]:
        """Status and JSON object of one answer; status 0 when none came. What was said last is kept in words."""
        data = None if body is None else json.dumps(body).encode()
        authorization = {"Authorization": f"Bearer {secret}"} if secret else {}
        request = urllib.request.Request(url, data, {"Content-Type": "application/json", **authorization})
        # A proxy from the user's environment has no business between us and our own site.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=wait_s) as response:
                status, text = int(response.status), response.read(MAX_ANSWER_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            self.last_answer = f"{url}: {error}"
            return 0, {}
        self.last_answer = f"{url}: {status} {text[:300].decode('utf-8', errors='replace')}"
        try:
            answer = json.loads(text)
        except ValueError:
            return status, {}
        return status, cast(dict[str, object], answer) if isinstance(answer, dict) else {}
