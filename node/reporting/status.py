"""A peer's status: the values that it shows, their JSON, and the join command that follows from them."""

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
from node.tasks.name import HUGGING_FACE, is_own

if TYPE_CHECKING:
    from node.reporting.report import RoundReport

MAX_WORD = 512
"""Most characters of a text that are shown; the rest is cut off."""
MAX_LISTED = 4096
"""Most peers or addresses in one status."""
MAX_NUMBER = 1 << 63


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Another peer, as this one sees it.

    Attributes:
        member: whether it is in the roster; always true with independent state. The roster is of this peer's stage:
            a peer of another stage counts as a member while it is live.
        live: whether it is live; otherwise the failure detector suspects it.
        address: a multiaddr, or empty if none is known.
        stage: its stage; 0 in a run without stages.
        route: how the latest bulk data went there: direct, dialled back (directly, but the peer had to dial), libp2p;
            empty if none was sent since the peer was met.
        route_reason: why it did not go directly.
        left: it is not live because it left in good order; a peer that is neither live nor left is lost.
    """

    peer: str
    nickname: str
    member: bool
    live: bool
    round: int
    address: str
    stage: int = 0
    route: str = ""
    route_reason: str = ""
    left: bool = False


@dataclass(frozen=True, slots=True)
class SyncStatus:
    """Progress of a peer that catches up.

    Attributes:
        bytes_here, bytes_whole: bytes of the state received, and in all; both 0 if the peer has a state to start from.
        donors: number of peers that send the state now.
        bytes_per_second: recent rate of everything that is downloaded.
        rounds_here, rounds_whole: rounds since that state which have been replayed, and all of them.
        eta_seconds: time left; None while nothing is received.
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
    """A peer's status, exactly as `status --json` prints it. A figure that is not known yet is nan, and null in JSON.

    Attributes:
        state: starting, joining, syncing, training, averaging, waiting, paused, leaving or finished.
        reason: user-facing explanation of the state.
        waiting_for: what the peer waits for: nicknames, short peer ids or other texts.
        rounds: number of rounds in the whole run.
        run: name of the run; run_id is the hash of its manifest, hex.
        protocol: name of the run's averaging protocol.
        peers: the other peers.
        addresses: multiaddrs at which others can dial this peer.
        tokens: tokens that this peer has trained on so far.
        loss: training loss in nats per token; held_out_loss is the same on data that no peer trains on.
        rss_bytes: memory of all processes of the peer.
        eta_seconds: time until the run's last round is done; None if it cannot be estimated.
        syncing: progress of catching up; None in other states.
        task: name of the user's own task; empty if the task is built in.
        clock: user-facing warning while this machine's clock differs from the others'; else empty.
        checkpoint_age_seconds: age of the newest whole checkpoint; None while there is none.
        spread, spread_limit: as in the last report that has them; nan with replicated state.
        stage, stages: this peer's stage, and the number of stages; 0 and 1 in a run without stages.
        round_seconds: time since the last round ended; nan before the first end.
        round_expected_seconds: mean duration of the last rounds; None if it is not known.
        joiners: number of joiners that download this peer's state now.
        checkpoint_problem: user-facing reason why the latest checkpoint failed; empty if it was written.
        limits: user-facing: this peer's limits on its traffic, what they cost the run, and its quota; else empty.
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
    stage: int = 0
    stages: int = 1
    round_seconds: float = math.nan
    round_expected_seconds: float | None = None
    joiners: int = 0
    checkpoint_problem: str = ""
    limits: str = ""


def public(status: Status) -> Status:
    """The part of a status that any peer may see: without this machine's process id and where the others are.

    A pause is shown as waiting, and without its cause and end: they say when its user is away from home.
    """
    if status.state == "paused":
        status = dataclasses.replace(status, state="waiting", reason="")
    return dataclasses.replace(
        status,
        pid=0,
        checkpoint_problem="",
        limits="",
        peers=tuple(dataclasses.replace(each, address="", route_reason="") for each in status.peers),
    )


class EventSink(Protocol):
    """Takes a peer's messages and reports. Never raises, never blocks."""

    def say(self, line: str) -> None:
        """Print a user-facing line."""

    def report(self, report: RoundReport) -> None:
        """Take the report of a round that has ended."""


@dataclass(frozen=True, slots=True)
class SwarmOptions:
    """Options of the command `swarm`; None leaves a value to the run file or to the defaults."""

    peers: int
    rounds: int | None
    protocol: str | None
    task: str | None
    run: Path | None
    directory: Path | None  # parent of all peers' state directories; None for a new one
    as_json: bool
    stages: int = 1  # peer i is in stage i mod `stages`
    page: bool = True
    inner: str | None = None


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


def to_json(value: _Dataclass | Mapping[str, object]) -> str:
    """Encode as one line of strict JSON. Floats that are not finite become null."""
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
    """Read a status from untrusted JSON. The result is bounded and safe to print. Raises ValueError."""
    status: Status = _parsed(Status, data, "status")
    return status


_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}


def _parsed(kind: Any, data: object, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} is not an object")
    names = {each.name: str(each.type) for each in dataclasses.fields(kind)}
    return kind(**{name: _value(of, data.get(name), f"{where}.{name}") for name, of in names.items()})


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
    """Make untrusted text safe to print: one line of at most `limit` characters, without terminal control codes."""
    return _CONTROL.sub(" ", text[:limit]).strip()


def short(peer: str) -> str:
    """A short form of a peer id: its last characters, because all ids begin alike."""
    return peer if len(peer) <= 8 else f"…{peer[-6:]}"


def join_command(status: Status) -> tuple[str, Scope] | None:
    """The command with which others join, and from where it works; None while no address is known."""
    if not status.addresses:
        return None
    best = min(status.addresses, key=scope)
    command = f"python -m node join --bootstrap {best}"
    if status.run_id:
        command += f" --run-id {status.run_id}"
    if is_own(status.task):  # checked, because the name may be a stranger's, and users paste this line into a shell
        command += f" --task {status.task}"
    if status.task == HUGGING_FACE:
        command += f" --task {status.task} --model MODEL --data FILE"
    return command, scope(best)


def who_joins(where: Scope) -> str:
    """The line before a join command: from where others can use it."""
    if where == Scope.ANYWHERE:
        return "Others join with:"
    which = "the same network" if where == Scope.NETWORK else "this machine"
    return f"Others join, from {which} only, with:"


def narrow(where: Scope, announced: bool) -> str:
    """A hint if others cannot dial this peer's best address from everywhere; empty if they can.

    `announced`: whether the user chose the announced addresses, so that a private one is meant.
    """
    if where >= Scope.MACHINE:
        return "this address works on this machine only: give another with --listen, so that others can join"
    if where == Scope.NETWORK and not announced:
        return (
            "this address is private, and works in its own network only: for others, forward or publish a fixed port "
            "(--listen /ip4/0.0.0.0/tcp/4001), and announce its public address (--announce)"
        )
    return ""
