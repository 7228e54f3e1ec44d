"""Plain values between a peer and those who look at it: what it shows of itself, and to whom."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from node.network.address_scope import Scope, scope
from node.tasks.name import is_own

if TYPE_CHECKING:
    from node.reporting.report import RoundReport

MAX_WORD = 512
"""Characters of a text that is shown; the rest of a longer one is cut off."""
MAX_LISTED = 4096
"""Peers or addresses in one status."""
MAX_NUMBER = 1 << 63


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Another peer, as this one sees it.

    Attributes:
        member: it is in the roster: its vote is asked for; of all, where nobody votes.
        live: it answers; else it is suspected of being gone.
        address: a multiaddr, or empty if none is known.
    """

    peer: str
    nickname: str
    member: bool
    live: bool
    round: int
    address: str


@dataclass(frozen=True, slots=True)
class SyncStatus:
    """How far a peer is with catching up.

    Attributes:
        bytes_here, bytes_whole: of the state; both 0 where it holds one to start from.
        donors: who bring it just now.
        bytes_per_second: of all that is fetched, lately.
        rounds_here, rounds_whole: of those since, whose steps it takes again.
        eta_seconds: None while nothing moves.
    """

    bytes_here: int
    bytes_whole: int
    donors: int
    bytes_per_second: float
    rounds_here: int
    rounds_whole: int
    eta_seconds: float | None


@dataclass(frozen=True, slots=True)
class Status:
    """What a peer is doing: exactly what `status --json` prints. A figure not known yet is nan, and null in JSON.

    Attributes:
        state: starting, joining, syncing, training, averaging, waiting, leaving or finished.
        reason: why, in words.
        waiting_for: nicknames or short peer ids, or what else.
        rounds: of the whole run.
        run: its name; run_id is the hash of its manifest, hex.
        protocol: by which its peers average.
        peers: the others; this peer is not among them.
        addresses: multiaddrs that others can dial.
        tokens: that this peer has trained on so far.
        loss: of training, nats per token, as held_out_loss is of data that no peer trains on.
        rss_bytes: of the peer's processes together.
        eta_seconds: until the run's last round is done; None where nobody can tell.
        syncing: None while it does something else.
        task: name of the user's own task that is trained; empty if it is one of ours.
        clock: in words, while this machine's clock is not the one that the others have; else empty.
        checkpoint_age_seconds: since the newest whole one was made; None while there is none.
        spread, spread_limit: as in the last report that told them; nan where peers share their state.
    """

    state: str
    reason: str
    waiting_for: tuple[str, ...]
    round: int
    rounds: int
    lineage: str
    run: str
    run_id: str
    peer: str
    nickname: str
    peers: tuple[PeerStatus, ...]
    addresses: tuple[str, ...]
    tokens: int
    tokens_per_second: float
    loss: float
    held_out_loss: float
    bytes_sent: int
    bytes_received: int
    rss_bytes: int
    loop_lag_p99_seconds: float
    eta_seconds: float | None
    pid: int
    incarnation: int
    task: str = ""
    syncing: SyncStatus | None = None
    clock: str = ""
    checkpoint_age_seconds: float | None = None
    protocol: str = ""
    spread: float = math.nan
    spread_limit: float = math.nan


def public(status: Status) -> Status:
    """What is anybody's business: not where others are, nor what runs on this machine."""
    return dataclasses.replace(
        status, pid=0, peers=tuple(dataclasses.replace(each, address="") for each in status.peers)
    )


class EventSink(Protocol):
    """Where a peer tells people what happens. Never raises, never blocks."""

    def say(self, line: str) -> None:
        """One line for a person, in plain words."""

    def report(self, report: RoundReport) -> None:
        """A round has ended."""


@dataclass(frozen=True, slots=True)
class SwarmOptions:
    """What `swarm` was asked for; None leaves it to the run's file, or to the defaults.

    Attributes:
        directory: holds the state directories of all peers; None: a new one.
        as_json: one object on stdout at the end.
    """

    peers: int
    rounds: int | None
    protocol: str | None
    task: str | None
    run: Path | None
    directory: Path | None
    as_json: bool


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


def to_json(value: _Dataclass | Mapping[str, object]) -> str:
    """One line of strict JSON; what is not a finite number becomes null."""
    plain = value if isinstance(value, Mapping) else dataclasses.asdict(value)
    return json.dumps(_finite(plain), allow_nan=False, separators=(",", ":"))


def _finite(value: object) -> object:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
    return value


def parse(data: object) -> Status:
    """A status from parsed JSON, from whomever it comes: bounded, and safe to print.

    Raises:
        ValueError: names the first field that is missing or of the wrong kind.
    """
    status: Status = _parsed(Status, data, "status")
    return status


_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}


def _parsed(kind: Any, data: object, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} is not an object")
    fields = dataclasses.fields(kind)
    return kind(**{each.name: _value(str(each.type), data.get(each.name), f"{where}.{each.name}") for each in fields})


def _value(kind: str, value: object, where: str) -> object:
    if kind.startswith("tuple["):
        if not isinstance(value, list) or len(value) > MAX_LISTED:
            raise ValueError(f"{where} is not a list of at most {MAX_LISTED}")
        item = kind.removeprefix("tuple[").removesuffix(", ...]")
        if item == "PeerStatus":
            return tuple(_parsed(PeerStatus, each, where) for each in value)
        return tuple(_value(item, each, where) for each in value)
    if kind == "SyncStatus | None":
        return None if value is None else _parsed(SyncStatus, value, where)
    if value is None and kind.startswith("float"):
        return None if kind.endswith("None") else math.nan
    kinds = _KINDS[kind.removesuffix(" | None")]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"{where} is missing, or not a {kind}")
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, int | float) and abs(value) > MAX_NUMBER:
        raise ValueError(f"{where} is too large a number")
    return value


_CONTROL = re.compile(r"[^\S ]+|[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def printable(text: str, limit: int = MAX_WORD) -> str:
    """One line of at most `limit` characters, without anything that a terminal obeys: others' words reach ours."""
    return _CONTROL.sub(" ", text[:limit]).strip()


def short(peer: str) -> str:
    """A peer id as people tell them apart: its end, because all begin alike."""
    return peer if len(peer) <= 8 else f"…{peer[-6:]}"


def join_command(status: Status) -> tuple[str, Scope] | None:
    """What others type to join, and from where that works; None while no address is known."""
    if not status.addresses:
        return None
    best = min(status.addresses, key=scope)
    command = f"python -m node join --bootstrap {best}"
    if status.run_id:
        command += f" --run-id {status.run_id}"
    if is_own(status.task):  # it may be a stranger's word, and somebody's shell reads this line
        command += f" --task {status.task}"
    return command, scope(best)


def who_joins(where: Scope) -> str:
    """Before a join command: who can use it."""
    if where == Scope.ANYWHERE:
        return "Others join with:"
    which = "the same network" if where == Scope.NETWORK else "this machine"
    return f"Others join, from {which} only, with:"


def narrow(where: Scope, announced: bool) -> str:
    """What keeps others from joining by this peer's best address, if something does that nobody asked for."""
    if where >= Scope.MACHINE:
        return "this address works on this machine only: --listen on another for others to join"
    if where == Scope.NETWORK and not announced:
        return (
            "this address is private, and works in its own network only: for others, forward or publish a fixed port "
            "(--listen /ip4/0.0.0.0/tcp/4001), and say where it is found (--announce)"
        )
    return ""
