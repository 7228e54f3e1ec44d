"""Files of addresses: what is read from one, what is written into one, and which place is none for one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from node.config.peer_sources import load_peer
from node.config.toml import ConfigError
from node.joining.addresses_file import (
    AGAIN_SECONDS,
    LOOK_SECONDS,
    MAX_ADDRESSES,
    MAX_BYTES,
    AddressLine,
    keep_addresses_file,
    parse_addresses,
    read_addresses,
    require_usable,
)
from node.joining.bootstrap import add_candidates
from node.membership.membership import Membership
from protocols.base import Member
from tests.sim.host import SimCompute
from tests.support.refusals import one_line
from tests.support.simulated import on_virtual_time

ME = "12D3KooWGC6TvWhfapngX6wvJHMYvKpDMXPb3ZnCZ6dMoaMtimQ5"
OTHER = "12D3KooWGRUfuFwTaVcXCnUbTbVLYYEkYgjDM3Bd7q4RuRyTQhaP"
FIRST, SECOND = (f"/{where}/tcp/4001/p2p/{OTHER}" for where in ("ip4/203.0.113.7", "dns4/founder"))


def test_file_has_one_address_per_line() -> None:
    text = f"# the founder\n\n  {FIRST}\r\n{SECOND} # by name\n{FIRST}\n/ip4/10.0.0.1/tcp/1/p2p/{ME}\n"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):  # as PowerShell's > writes it
        assert parse_addresses(ME, text.encode(encoding)) == AddressLine((FIRST, SECOND))


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "holds no addresses yet"),
        (b"\n # nothing\n", "holds no addresses yet"),
        (f"/ip4/10.0.0.1/tcp/1/p2p/{ME}".encode(), "holds only this peer's addresses"),
        (b"10.0.0.1:4001", "line 1: '10.0.0.1:4001' is not a multiaddr: write /ip4/10.0.0.1/tcp/4001"),
        (b"\n/ip4/10.0.0.1/tcp/4001", "line 2: /ip4/10.0.0.1/tcp/4001 does not say which peer it is"),
        (b"\xff\x00\x1b[2J", "line 1: '\ufffd\\x00\\x1b[2J' is not a multiaddr"),
        (b"/" * 5000, "line 1: longer than 325 characters: is it an address?"),
    ],
)
def test_file_without_address_reports_what_is_missing(data: bytes, words: str) -> None:
    named = parse_addresses(ME, data)
    assert isinstance(named, AddressLine) and named.addresses == ()
    assert named.complaint.startswith(words) and named.complaint.isprintable()


def test_bad_line_is_skipped_and_sizes_are_bounded() -> None:
    named = parse_addresses(ME, f"nonsense\n{FIRST}".encode())
    assert isinstance(named, AddressLine) and named.addresses == (FIRST,) and named.complaint.startswith("line 1: ")
    many = "".join(f"/ip4/10.0.0.1/tcp/{port}/p2p/{OTHER}\n" for port in range(1, MAX_ADDRESSES + 2))
    named = parse_addresses(ME, many.encode())
    assert (
        isinstance(named, AddressLine) and len(named.addresses) == MAX_ADDRESSES and "the first 64" in named.complaint
    )
    assert parse_addresses(ME, b"#" * (MAX_BYTES + 1)) == "longer than 64 KiB: is it a file of addresses?"


def test_unreadable_file_reports_the_reason(tmp_path: Path) -> None:
    assert read_addresses(ME, tmp_path / "f") == "no such file yet"
    assert read_addresses(ME, tmp_path / "d" / "f") == f"no such file yet, nor the directory {tmp_path / 'd'}"
    assert read_addresses(ME, tmp_path) == "is not a regular file"
    assert read_addresses(ME, Path("/dev/zero")) == "is not a regular file"


@pytest.mark.parametrize(
    "path, words",
    [
        ("", "is not a regular file"),
        ("missing/file", "there is no directory"),
        ("read", "is read by --bootstrap"),
        ("/proc/file", "nothing can be written in /proc"),
        ("/dev/null", "/dev/null is not a regular file"),
    ],
)
def test_unwritable_path_is_rejected(tmp_path: Path, path: str, words: str) -> None:
    flags = {"addresses_file": tmp_path / path, "bootstrap": [f"@{tmp_path}/./read"]}
    line = one_line(ConfigError, require_usable, load_peer(flags, {}, None))
    assert line.startswith("flag --addresses-file: ") and words in line and "name" in line
    require_usable(load_peer({"addresses_file": tmp_path / "file"}, {}, None))


@on_virtual_time
async def test_file_follows_addresses_and_survives_disk_failures(tmp_path: Path) -> None:
    path, said = tmp_path / "there" / "addresses", list[str]()
    here = list[str]()
    task = asyncio.create_task(keep_addresses_file(path, lambda: here, SimCompute(), said.append))
    await asyncio.sleep(10.0)
    assert not said, "there is nothing to say yet"
    here.append(FIRST)
    await asyncio.sleep(2 * LOOK_SECONDS)
    path.parent.mkdir()
    await asyncio.sleep(AGAIN_SECONDS)
    assert path.read_text() == f"{FIRST}\n"
    path.unlink()
    path.parent.rmdir()
    here[:] = [SECOND]
    await asyncio.sleep(2 * LOOK_SECONDS)
    path.parent.mkdir()
    here[:] = [SECOND, FIRST]
    await asyncio.sleep(2 * LOOK_SECONDS)
    assert read_addresses(ME, path) == AddressLine((SECOND, FIRST))
    here.clear()  # p2pd is down
    await asyncio.sleep(2 * LOOK_SECONDS)
    task.cancel()
    await asyncio.wait([task])
    assert read_addresses(ME, path) == AddressLine((SECOND, FIRST)) and [*path.parent.iterdir()] == [path]
    assert said == 2 * [
        f"{path}: cannot write this peer's addresses (No such file or directory): retrying",
        f"{path}: this peer's addresses are written now",
    ]


def test_hints_only_while_no_peer_is_live() -> None:
    here, hints = [Member(ME, 1)], list[tuple[str, tuple[str, ...]]]()
    membership = SimpleNamespace(live=lambda: here, add_candidate=lambda *given: hints.append(given))
    add = add_candidates(cast(Membership, membership))
    add((FIRST, SECOND))
    assert hints == [(OTHER, (each.rpartition("/p2p/")[0],)) for each in (FIRST, SECOND)]
    here.append(Member(OTHER, 1))
    add((FIRST,))
    assert len(hints) == 2
