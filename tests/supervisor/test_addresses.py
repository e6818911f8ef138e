"""BROKER_URL as every client of a process gets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydra_site import addresses
from hydra_site.supervisor.home import Home


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("redis://u:p@db.lan:6379/0", "redis://u:p@db.lan:6379/0"),
        ("valkey://db.lan", "redis://db.lan"),
        ("valkeys://db.lan/0", "rediss://db.lan/0?ssl_cert_reqs=required"),
        ("rediss://db.lan/0?ssl_ca_certs=/ca.pem", "rediss://db.lan/0?ssl_ca_certs=/ca.pem&ssl_cert_reqs=required"),
        ("rediss://db.lan/0?ssl_cert_reqs=none", "rediss://db.lan/0?ssl_cert_reqs=none"),
    ],
)
def test_a_certificate_is_checked_unless_the_url_says_otherwise(
    given: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_URL", given)
    assert addresses.broker_url(Home(tmp_path)) == used
