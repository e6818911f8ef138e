"""The secret that an engine beyond loopback asks for on HTTP, as both sides have it. Free of Django.

It is made from the secret of the engine's binary protocol, which never goes over the wire itself: who overhears the one cannot
use the other, and there is only one secret to keep.
"""

import hashlib
import hmac

from engines.browser_guard import is_loopback

_PURPOSE = b"hydra engine http"


def http_secret(rpc_secret: str, address: str) -> str:
    """The HTTP secret of an engine that listens on `address`; "" on loopback and for an engine without secrets."""
    if not rpc_secret or is_loopback(address):
        return ""
    return hmac.new(rpc_secret.encode(), _PURPOSE, hashlib.sha256).hexdigest()
