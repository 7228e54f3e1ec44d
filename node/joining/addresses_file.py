"""Files of addresses, through which peers that share a directory find each other without a known address.

`join --addresses-file PATH` writes one, `join --bootstrap @PATH` reads it. It has one address per line, in the form of
the join line. Blank lines, and what follows a #, are ignored.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from node.config.multiaddrs import FILE_SIGN, peer_address
from node.config.peer_config import PeerConfig
from node.config.toml import ConfigError, decoded
from node.membership.hello import MAX_ADDRESS_CHARACTERS
from node.storage.statedir import write_atomically
from protocols.base import Compute, PeerId

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 16
MAX_ADDRESSES = 64
LOOK_SECONDS = 2.0
AGAIN_SECONDS = 60.0  # pause after a failed write, unless the addresses change earlier


@dataclass(frozen=True, slots=True)
class AddressLine:
    """The content of a file: addresses of other peers, and a user-facing line about what is wrong with it."""

    addresses: tuple[str, ...]
    complaint: str = ""


def read_addresses(me: PeerId, path: Path) -> AddressLine | str:
    """Read a file, without this peer's own addresses; on failure return a user-facing reason. Blocks on the disk."""
    try:
        if path.exists() and not path.is_file():
            return "is not a regular file"
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return "no such file yet" if path.parent.is_dir() else f"no such file yet, nor the directory {path.parent}"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return parse_addresses(me, data)


def parse_addresses(me: PeerId, data: bytes) -> AddressLine | str:
    if len(data) > MAX_BYTES:
        return f"longer than {MAX_BYTES >> 10} KiB: is it a file of addresses?"
    found: dict[str, None] = {}
    complaint, own = "", False
    for number, line in enumerate(decoded(data, "replace").splitlines(), 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        try:
            address = _checked(text)
        except ValueError as error:
            complaint = complaint or f"line {number}: {error}"
            continue
        own |= address.endswith(f"/p2p/{me}")
        if not address.endswith(f"/p2p/{me}"):
            found[address] = None
    if len(found) > MAX_ADDRESSES:
        complaint = complaint or f"has {len(found)} addresses, of which only the first {MAX_ADDRESSES} are used"
    if not found:
        complaint = complaint or ("holds only this peer's addresses" if own else "holds no addresses yet")
    return AddressLine(tuple(found)[:MAX_ADDRESSES], complaint)


def _checked(text: str) -> str:
    limit = MAX_ADDRESS_CHARACTERS + len("/p2p/") + 64
    if len(text) > limit:
        raise ValueError(f"longer than {limit} characters: is it an address?")
    return peer_address(text)


def require_usable(config: PeerConfig) -> None:
    """Check at the start that the file of `--addresses-file` can be written; else raise `ConfigError`."""
    path = config.addresses_file
    if path is None:
        return
    why = ""
    if path.exists() and not path.is_file():
        why = f"{path} is not a regular file: name one"
    elif not path.parent.is_dir():
        why = f"{path}: there is no directory {path.parent}: create it, or name a file in another"
    elif any(path.resolve() == Path(each[1:]).resolve() for each in config.bootstrap if each.startswith(FILE_SIGN)):
        why = f"{path} is read by --bootstrap: this peer would write its own addresses over the others'; name another"
    else:
        try:
            with tempfile.TemporaryFile(dir=path.parent):  # replacing a file there needs the same rights
                pass
        except OSError as error:
            why = (
                f"{path}: nothing can be written in {path.parent} ({error.strerror}): name a file in another directory"
            )
    if why:
        raise ConfigError(f"{config.origins['addresses_file']}: {why}", "addresses_file")


async def keep_addresses_file(
    path: Path, addresses: Callable[[], Sequence[str]], disk: Compute, say: Callable[[str], None]
) -> None:
    """Write this peer's addresses, again whenever they change, until cancelled. A restarted peer finds its old file."""
    loop = asyncio.get_running_loop()
    tried: tuple[str, ...] = ()
    again, failure = 0.0, ""
    while True:
        here = tuple(addresses())[:MAX_ADDRESSES]
        if here and (here != tried or (failure and loop.time() >= again)):
            data, why = "".join(f"{each}\n" for each in here).encode(), ""
            try:
                await disk.run(partial(write_atomically, path, data), len(data))
                log.info("addresses written to %s: %s", path, ", ".join(here))
            except OSError as error:
                why = error.strerror or type(error).__name__
            if why and why != failure:
                say(f"{path}: cannot write this peer's addresses ({why}): retrying")
            elif failure and not why:
                say(f"{path}: this peer's addresses are written now")
            tried, failure, again = here, why, loop.time() + AGAIN_SECONDS
        await asyncio.sleep(LOOK_SECONDS)
