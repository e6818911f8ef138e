"""How a process of a host is reached."""


def http_url(address: str, port: int) -> str:
    """The base URL of a server on this IP address."""
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
