"""Who counts as a program of this machine, and which requests a foreign page made a browser send."""

import pytest

from engines.browser_guard import foreign_page, host_name, is_loopback


@pytest.mark.parametrize("name", ["localhost", "a.localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback_names_and_addresses_are_known(name: str) -> None:
    assert is_loopback(name)


@pytest.mark.parametrize("name", ["", "0.0.0.0", "192.168.1.2", "localhost.evil.example", "evil.example", "::", "1"])
def test_other_names_and_addresses_are_not_loopback(name: str) -> None:
    assert not is_loopback(name)


@pytest.mark.parametrize(
    ("header", "name"),
    [("127.0.0.1:9000", "127.0.0.1"), ("[::1]:9000", "::1"), ("LocalHost", "localhost"), ("[", ""), ("", "")],
)
def test_a_host_header_gives_its_name(header: str, name: str) -> None:
    assert host_name(header) == name


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example", "Host": "127.0.0.1:9000"},
        {"Origin": "http://127.0.0.1:8000", "Host": "127.0.0.1:9000"},
        {"Origin": "null", "Host": "127.0.0.1:9000"},
        {"Origin": "http://[", "Host": "127.0.0.1:9000"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_foreign_page_is_told(headers: dict[str, str]) -> None:
    assert foreign_page(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://127.0.0.1:9000", "Host": "127.0.0.1:9000"},
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ],
)
def test_programs_and_own_pages_pass(headers: dict[str, str]) -> None:
    assert foreign_page(headers) is None
