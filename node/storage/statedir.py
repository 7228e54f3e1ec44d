"""A peer's state directory: its identity, its run, the peers it has met, and its reports.

identity.key    the Ed25519 key                     peers.json     peers it has met, and their addresses
incarnation     how often it was started            rounds.jsonl   one report a line; older ones in rounds.1.jsonl …
manifest.bin    the sealed manifest of its run      held-out.bin   the sample that all peers evaluate on
sample.txt      text of the model at the end        certificates.bin   its chain (`node.storage.certificate_log`)
checkpoints/    its state before some rounds (`node.storage.checkpoint`)
listen.json     addresses it was asked to listen on, and those with the chosen ports
data.json       what its data were at its last start (`node.tasks.given_data`)
pause.json      exists if the peer was asked to pause (`node.session.pausing`)
pass.bin        its passes to private runs          invites.json   tickets that it has made, and who has used them
revoked.bin     peers that were removed from its private run (`node.storage.pass_files` has these three)
seats.json      the first members of all stages that it knows (`node.membership.seats`)
endorsed.json   the seats of lost stages that it has endorsed (`node.session.stage_refill`)
stage           in a run with stages, the number of its stage, and "pinned" if its user has moved it there;
                certificates.bin and checkpoints/ lie in stages/<k>/ then
stages/<k>/     what belongs to stage k, where it is or has been, or of which it has a backup: these two, and
                stage.json: the stage's first member
stages/<k>-<n>/ the same of a stage that has begun again with its seat number n
over            exists if the run is over           scratch/       parts of past rounds, of this incarnation
past/<run>/     files of its earlier runs; past/<run>-unused/: checkpoints that are not on its chain
past/stage/     files of a stage that it has left before its first round
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

from node.membership.hello import MAX_RUN_BYTES, MAX_SAMPLE_BYTES, sound
from node.runtime.identity import Identity, load_or_create, sync_directory
from node.runtime.json_file import read_json
from node.storage.journal import KEEP_FILES
from protocols.base import PeerId

log = logging.getLogger(__name__)

SCRATCH = "scratch"  # directory of buffers on the disk; the name is here because what is refused shall not load PyTorch
MAX_CACHED_PEERS = 64
MAX_INCARNATION = 1 << 40  # the limit of `protocols.wire`: other peers ignore members of a higher incarnation
_OF_A_RUN = (
    "manifest.bin", "held-out.bin", "peers.json", "rounds.jsonl", "sample.txt", "over", "totals.json",
    "certificates.bin", "checkpoints", "stage.json", "seats.json", "endorsed.json", "stage", "stages", "invites.json",
    "revoked.bin",
    *(f"rounds.{number}.jsonl" for number in range(1, KEEP_FILES + 1)),
)  # fmt: skip
_MAX_CACHE_BYTES = 1 << 20
STAGE = "stage.json"
STAGES, _PRESENT, _PINNED = "stages", "stage", "pinned"


class StateError(Exception):
    """The directory cannot be used. The message says what happened, why, and what to do."""


class StateDir:
    """The state directory of a peer. The caller ensures that only one process uses it at a time."""

    def __init__(self, path: Path, identity: Identity, incarnation: int) -> None:
        self.path, self.identity, self.incarnation = path, identity, incarnation
        self._moved: Sequence[tuple[Path, Path]] | None = None  # files that `begin` moved aside: (from, to)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Create the directory if there is none, and start a new incarnation. Raises StateError and IdentityError."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened = cls(path, load_or_create(path / "identity.key"), _next_incarnation(path / "incarnation"))
            opened._take_over()
            return opened
        except OSError as error:
            raise StateError(
                f"cannot write {error.filename or path} ({error.strerror}): "
                "name a writable directory with free space by --state-dir"
            ) from None

    def next_incarnation(self) -> None:
        """Start a new incarnation of the peer in the same process. Raises StateError."""
        try:
            self.incarnation = _next_incarnation(self.path / "incarnation")
        except OSError as error:
            raise StateError(f"cannot write {self.path} ({error.strerror}): free space there") from None

    @property
    def rounds(self) -> Path:
        return self.path / "rounds.jsonl"

    @property
    def sample(self) -> Path:
        return self.path / "held-out.bin"

    @property
    def data(self) -> Path:
        return self.path / "data.json"

    @property
    def home(self) -> Path:
        """Where the chain and the checkpoints lie: the directory of the present stage, in a run with stages."""
        return home_of(self.path)

    @property
    def certificates(self) -> Path:
        return self.home / "certificates.bin"

    # -- the run ------------------------------------------------------------------------------------------------------

    def manifest(self) -> bytes:
        """The sealed manifest of this directory's run; empty if it has none."""
        return _read(self.path / "manifest.bin", MAX_RUN_BYTES)

    def held_out(self) -> bytes:
        """The run's evaluation sample; empty if there is none."""
        return _read(self.sample, MAX_SAMPLE_BYTES)

    def stage(self) -> bytes:
        """The seat of this peer's stage in the directory's run, as `enter_stage` was given it; empty if it has none."""
        return _read(self.home / STAGE, _MAX_CACHE_BYTES)

    def stage_home(self, stage: int | str) -> Path:
        """The directory of a stage, or of the one with this name."""
        return self.path / STAGES / str(stage)

    def stage_homes(self, stage: int) -> list[Path]:
        """All directories of a stage: that of its first seat, and of each one with which it has begun again."""
        found = (self.path / STAGES).glob("*")
        return [each for each in found if each.name.partition("-")[0] == str(stage)]

    def prepare_stage(self, stage: int | str, seat: bytes) -> Path:
        """Make the directory of a stage, or find it as it was left, and save the stage's seat there."""
        home = self.stage_home(stage)
        try:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_directory(home.parent)
        except OSError as error:
            raise StateError(f"cannot write {home} ({error.strerror}): free space there") from None
        self._keep_durably(home / STAGE, seat)
        return home

    def switch_stage(self, stage: int | str, *, pinned: bool = False) -> None:
        """Make a prepared stage the present one. After a crash either it is, or the former one. Raises StateError.

        A peer that is `pinned` does not leave it by itself.
        """
        self._keep_durably(self.path / _PRESENT, f"{stage} pinned\n".encode() if pinned else f"{stage}\n".encode())

    @property
    def is_pinned(self) -> bool:
        """Whether a user has moved the peer to its present stage. Raises StateError."""
        return _PINNED in _present(self.path)

    def has_left(self, stage: int) -> bool:
        """Whether this peer has been in a stage, and was moved to another."""
        homes = self.stage_homes(stage)
        return self.home not in homes and any(any(each.glob("checkpoints/*/inner.safetensors")) for each in homes)

    def enter_stage(self, stage: int | str, seat: bytes) -> None:
        """Save this peer's stage, which it keeps once the run has begun. Raises StateError."""
        self.prepare_stage(stage, seat)
        self.switch_stage(stage)

    def seats(self) -> bytes:
        """The known seats, as `keep_seats` was given them; empty if there are none."""
        return _read(self.path / "seats.json", _MAX_CACHE_BYTES)

    def keep_seats(self, seats: bytes) -> None:
        """Save the known seats. When this returns, they survive a power failure. Raises StateError."""
        self._keep_durably(self.path / "seats.json", seats)

    def endorsed(self) -> bytes:
        """What `keep_endorsed` was given; empty if there is nothing."""
        return _read(self.path / "endorsed.json", _MAX_CACHE_BYTES)

    def keep_endorsed(self, seats: bytes) -> None:
        """Save which seats this peer has endorsed; as `keep_seats`. Raises StateError."""
        self._keep_durably(self.path / "endorsed.json", seats)

    def leave_stage(self) -> None:
        """Move what belongs to this peer's stage aside, as its seat does not count any more. Raises StateError."""
        try:
            past = self._past("stage")
            if self.home != self.path:
                self.home.rename(past / self.home.name)  # without it, the peer is in no stage
                sync_directory(past)
            (self.path / _PRESENT).unlink(missing_ok=True)
            sync_directory(self.path)
        except OSError as error:
            raise StateError(f"cannot write {self.path} ({error.strerror}): make it writable") from None

    def _take_over(self) -> None:
        """Move what belongs to a stage into its directory. Earlier versions had it beside the rest. Raises OSError.

        A crash at any point leaves what the next start takes over: stage.json goes last.
        """
        if not (self.path / STAGE).exists():
            return
        try:
            home = self.stage_home(_stage_in(self.path / STAGE))
        except StateError:
            return  # it is read as it is: the peer says what is damaged
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(self.path / _PRESENT, home.name.encode())
        for name in ("certificates.bin", "checkpoints", STAGE):
            if (self.path / name).exists():
                if (home / name).exists():
                    (home / name).rename(self._past("stage") / name)
                (self.path / name).rename(home / name)
            sync_directory(home)
            sync_directory(self.path)
        log.warning("the files of stage %s are in %s from now on", home.name, home)

    def _keep_durably(self, path: Path, data: bytes) -> None:
        try:
            write_atomically(path, data)
        except OSError as error:
            raise StateError(f"cannot write {path} ({error.strerror}): free space there") from None

    @property
    def is_over(self) -> bool:
        return is_over(self.path)

    def begin(self, run_id: str, before: str, sealed: bytes, sample: bytes) -> None:
        """Make this the directory of a run. The files of an earlier run, `before`, move aside. Raises StateError."""
        try:
            self._moved = self._put_aside(before) if before != run_id else None
            if self.manifest() != sealed:
                write_atomically(self.path / "manifest.bin", sealed)
            if sample and self.held_out() != sample:
                write_atomically(self.sample, sample)
        except OSError as error:
            raise StateError(
                f"cannot write {error.filename or self.path} ({error.strerror}): free space there"
            ) from None

    def withdraw(self) -> None:
        """Undo `begin` before any training: move back what it moved aside. Raises StateError; nothing is lost then.

        Does nothing if the directory already was of that run.
        """
        if self._moved is None:
            return
        try:
            for name in _OF_A_RUN:
                if (self.path / name).is_file():
                    (self.path / name).unlink()
            shutil.rmtree(self.path / STAGES, ignore_errors=True)
            for place, aside in self._moved:
                aside.rename(place)
            sync_directory(self.path)
            for past in {aside.parent for _, aside in self._moved}:
                past.rmdir()
        except OSError as error:
            raise StateError(f"cannot write {self.path} ({error.strerror}): its former files are in past/") from None
        self._moved = None

    def _put_aside(self, run_id: str) -> list[tuple[Path, Path]]:
        """Move the files of a run aside, and return them as (from, to)."""
        there = [self.path / name for name in _OF_A_RUN if (self.path / name).exists()]
        if not there:
            return []
        shutil.rmtree(self.path / SCRATCH, ignore_errors=True)  # only that run's peers needed it
        past = self._past(run_id[:16] or "unknown")
        for file in there:
            file.rename(past / file.name)
        sync_directory(past)
        sync_directory(self.path)
        return [(file, past / file.name) for file in there]

    def quarantine(self, run_id: str, checkpoints: Collection[Path]) -> Path:
        """Move checkpoints, and a copy of the present chain, to a new directory; returns its path. Raises OSError."""
        past = self._past(f"{run_id[:16]}-unused")
        if self.certificates.exists():
            shutil.copyfile(self.certificates, past / self.certificates.name)
            _sync_file(past / self.certificates.name)
        for path in checkpoints:
            (past / path.parent.name).mkdir(exist_ok=True)
            path.rename(past / path.parent.name / path.name)
        for each in {past, *(past / path.parent.name for path in checkpoints), *(path.parent for path in checkpoints)}:
            sync_directory(each)
        return past

    def _past(self, name: str) -> Path:
        past, number = self.path / "past" / name, 1
        while past.exists():
            number += 1
            past = past.with_name(f"{name}-{number}")
        past.mkdir(parents=True)
        sync_directory(past.parent)
        return past

    def keep_text(self, text: bytes) -> None:
        """Save text that the run's model generated. Blocks."""
        with suppress(OSError):
            write_atomically(self.path / "sample.txt", text)

    # -- known peers --------------------------------------------------------------------------------------------------

    def peers(self) -> dict[PeerId, tuple[str, ...]]:
        """Peers that were live when this peer last took part, and their addresses; unreadable entries are left out."""
        try:
            entries = read_json(self.path / "peers.json", _MAX_CACHE_BYTES)
        except (OSError, ValueError):
            return {}
        if not isinstance(entries, dict):
            return {}
        found = {peer: sound(addresses) for peer, addresses in entries.items() if isinstance(addresses, list)}
        return dict(list(found.items())[:MAX_CACHED_PEERS])

    def remember(self, peers: Mapping[PeerId, Sequence[str]]) -> None:
        """Save the peers that are live now, followed by those saved before, up to `MAX_CACHED_PEERS`. Blocks."""
        merged = {peer: sound(addresses) for peer, addresses in peers.items()}
        for peer, addresses in self.peers().items():
            merged.setdefault(peer, addresses)
        kept = {peer: merged[peer] for peer in list(merged)[:MAX_CACHED_PEERS]}
        if kept != self.peers():
            with suppress(OSError):  # a full disk must not end a round
                write_atomically(self.path / "peers.json", json.dumps(kept, indent=1).encode())

    def forget(self) -> None:
        """Mark the run as over, and forget its peers. Blocks."""
        with suppress(OSError):
            (self.path / "over").touch()
            (self.path / "peers.json").unlink(missing_ok=True)
            sync_directory(self.path)

    def listening(self, asked: Sequence[str]) -> tuple[str, ...]:
        """Addresses, with ports, of the previous incarnation, if it was asked to listen on the same addresses."""
        try:
            kept = read_json(self.path / "listen.json", _MAX_CACHE_BYTES)
            took = kept["took"] if kept["asked"] == [*asked] else []
        except (OSError, ValueError, KeyError, TypeError):
            return ()
        fits = isinstance(took, list) and len(took) == len(asked) and all(isinstance(each, str) for each in took)
        return sound(took) if fits and len(sound(took)) == len(asked) else ()

    def listens(self, asked: Sequence[str], took: Sequence[str]) -> None:
        """Save the addresses of this incarnation, where peers that know it will look for it after a restart."""
        if self.listening(asked) != tuple(took):
            with suppress(OSError):
                write_atomically(self.path / "listen.json", json.dumps({"asked": [*asked], "took": [*took]}).encode())

    def addresses(self) -> Iterable[str]:
        for peer, addresses in self.peers().items():
            yield from (f"{address}/p2p/{peer}" for address in addresses[:4])


def holds_run(directory: Path) -> bool:
    """Whether a directory's run can be resumed: it is not over, and has known peers, checkpoints or a stage.

    A founder that was killed early has only its stage, and may have given others to peers that wait for it.
    """
    if not (directory / "manifest.bin").exists() or is_over(directory):
        return False
    home = home_of(directory)
    return any(each.exists() for each in (directory / "peers.json", home / "checkpoints", home / STAGE))


def is_over(directory: Path) -> bool:
    return (directory / "over").exists()


def home_of(directory: Path) -> Path:
    """Where the chain and the checkpoints of a state directory lie: in the directory of its peer's present stage.

    The directory itself, in a run without stages, or if a model was fetched into it. Raises StateError.
    """
    words = _present(directory)
    return directory / STAGES / words[0] if words else directory


def _present(directory: Path) -> list[str]:
    """The name of the present stage's directory, then `_PINNED` or nothing; empty without stages. Raises StateError."""
    try:
        words = (directory / _PRESENT).read_bytes().decode("ascii", "replace").split()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StateError(f"{directory / _PRESENT} cannot be read ({error.strerror}): repair it") from None
    if not (words and re.fullmatch(r"[0-9]{1,3}(-[0-9]{1,7})?", words[0]) and words[1:] in ([], [_PINNED])):
        raise StateError(f"{directory / _PRESENT} is damaged: write the number of its peer's stage into it")
    return words


def read_stage(directory: Path) -> int:
    """The stage that a directory's peer holds; 0 if there is no `stage.json`. Raises StateError."""
    return _stage_in(home_of(directory) / STAGE)


def _stage_in(path: Path) -> int:
    try:
        found = read_json(path)
        stage = 0 if found is None else found["stage"]
        if type(stage) is not int or stage < 0:
            raise ValueError
    except OSError as error:
        raise StateError(f"{path} cannot be read ({error.strerror}): repair it") from None
    except (ValueError, KeyError, TypeError):
        raise StateError(f'{path} is damaged: write {{"stage": K}} into it, K being the stage of its peer') from None
    return stage


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError:
        return b""


def write_atomically(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace a file's content. After a crash it has the old or the new content; after this returns, the new one.

    Raises OSError; the old content stays then. Only this user can read a file that is `private`.
    """
    temporary = path.with_name(f".{path.name}.new")
    if private:
        temporary.unlink(missing_ok=True)
    with open(temporary, "wb", opener=partial(os.open, mode=0o600 if private else 0o666)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def _sync_file(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _next_incarnation(path: Path) -> int:
    """Increase the incarnation by one. A member that returned with an old incarnation could vote twice.

    So only a missing file counts as 0. An empty or unreadable file is an error.
    """
    try:
        with path.open("rb") as file:
            text = file.read(32).decode(errors="replace").strip()
    except FileNotFoundError:
        text = "0"
    if not text.isdecimal() or int(text) >= MAX_INCARNATION:
        raise StateError(
            f"{path} is damaged: write a number into it that is higher than any incarnation that other peers have seen"
        )
    incarnation = int(text) + 1
    write_atomically(path, f"{incarnation}\n".encode())
    return incarnation
