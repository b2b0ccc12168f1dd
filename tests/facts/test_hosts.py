"""Addresses as people read them."""

from __future__ import annotations

import pytest

from manyhands.facts.hosts import host_and_port, plain_host


@pytest.mark.parametrize(("host", "text"), [
    ("192.168.1.5", "192.168.1.5:7077"), ("fd00::5", "[fd00::5]:7077"), ("pi.local", "pi.local:7077"),
    ("fe80::1%eth0", "[fe80::1%eth0]:7077"), ("::", "[::]:7077"),
])  # fmt: skip
def test_brackets_keep_an_address_apart_from_its_port(host: str, text: str) -> None:
    assert host_and_port(host, 7077) == text


@pytest.mark.parametrize(("host", "plain"), [
    ("::ffff:192.168.1.5", "192.168.1.5"), ("FD00:0::5", "fd00::5"), ("fe80::1%eth0", "fe80::1%eth0"),
    ("localhost", "localhost"), ("[::1]", "::1"), ("127.0.0.1", "127.0.0.1"), ("", ""),
])  # fmt: skip
def test_an_address_has_one_spelling(host: str, plain: str) -> None:
    assert plain_host(host) == plain
