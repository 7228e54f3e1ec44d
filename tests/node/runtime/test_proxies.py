"""Tests of what is told about proxies."""

from __future__ import annotations

from importlib import machinery

import pytest

from node.runtime import proxies


@pytest.mark.parametrize(
    "variables, has_socks, line, remedy",
    [
        ({}, False, "", ""),
        ({"NO_PROXY": "*", "ALL_PROXY": " "}, False, "", ""),
        ({"https_proxy": "http://u:secret@p"}, False, "https_proxy is set; peers are dialled directly, not", "is set:"),
        ({"ALL_PROXY": "socks5h://u:secret@p"}, True, "ALL_PROXY is set; peers", "; ALL_PROXY is set: does the proxy"),
        ({"ALL_PROXY": "socks5h://u:secret@p"}, False, "ALL_PROXY is set; peers", "missing: pip install socksio"),
    ],
)
def test_proxies_are_named_without_their_passwords(
    variables: dict[str, str], has_socks: bool, line: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = machinery.ModuleSpec("socksio", None) if has_socks else None
    monkeypatch.setattr(proxies, "find_spec", lambda name: spec)
    for name in ("HTTPS_PROXY", "ALL_PROXY", "HTTP_PROXY"):
        for each in (name, name.lower()):
            monkeypatch.delenv(each, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    told, advised = proxies.dialled_directly(), proxies.download_remedy()
    assert (line in told and remedy in advised) and bool(told) == bool(advised) == bool(line)
    assert "secret" not in told + advised
