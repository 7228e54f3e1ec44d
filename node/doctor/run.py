"""The check of the run in a state directory: can it be resumed, and from where."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from node.config.manifest import ManifestError, unseal
from node.doctor.findings import Finding, Level, found
from node.doctor.machine import Fault
from node.runtime.identity import verify
from node.runtime.program import typed
from node.storage.certificate_log import stored
from node.storage.checkpoint import DIRECTORY, Checkpoint, CheckpointError, described, places, verified
from node.storage.statedir import StateError, home_of, is_over
from protocols import wire
from protocols.base import BadPayload
from protocols.consensus import record as records
from protocols.consensus.messages import Certificate

VERIFY_BYTES = 1e9  # a larger checkpoint is compared by the sizes of its files: digests take a second a gigabyte
_ENTRY_BYTES, _MAGIC_BYTES = 8, 8


@dataclass(frozen=True, slots=True)
class SavedRun:
    name: str = ""  # empty: the directory holds no run
    run_id: str = ""
    problem: str = ""  # why the manifest cannot be read, and what to do
    is_over: bool = False
    decided: int | None = None  # number of the first round that is not decided; None: it has no certificates
    certificates_are_cut: bool = False
    checkpoint: int | None = None  # number of rounds before the newest whole checkpoint; None: there is none
    damaged: tuple[str, ...] = ()  # what is wrong with newer ones


def check_run(facts: SavedRun) -> list[Finding]:
    if facts.problem:
        what, _, cure = facts.problem.rpartition(": ")
        return [Finding("run", Level.FAIL, what, cure or f"join it again: {typed('join --bootstrap ADDRESS')}")]
    if not facts.name:
        return [Finding("run", Level.OK, "the state directory holds no run yet")]
    text = f"run {facts.name} ({facts.run_id[:12]})"
    if facts.is_over:
        return [Finding("run", Level.OK, f"{text} is over")]
    text += "" if facts.decided is None else f", certificates lead to round {facts.decided}"
    text += ", no checkpoint yet" if facts.checkpoint is None else f", checkpoint {facts.checkpoint} is whole"

    def faults() -> Iterator[Fault]:
        if facts.damaged and facts.checkpoint is None:
            cure = (
                f"{typed('join --bootstrap ADDRESS')} downloads the state again; or restore the directory from a copy"
            )
            yield Level.FAIL, f"{facts.damaged[0]}, and there is no other", cure
        elif facts.damaged:
            what = f"{facts.damaged[0]}: the peer would start from the one before round {facts.checkpoint + 1}"  # type: ignore[operator]
            yield Level.WARN, what, "check the disk: a file has changed that nothing of Starling changes"
        if facts.certificates_are_cut:
            what = (
                f"certificates.bin is damaged after round {facts.decided or 0}: later rounds are asked of other peers"
            )
            yield Level.WARN, what, "check the disk"

    return found("run", text, faults())


def saved_run(directory: Path, sealed: bytes, is_running: bool) -> SavedRun:
    """Read the run of a state directory, of which `sealed` is the sealed manifest. Changes nothing.

    A running peer checks its own checkpoints: only the newest one's manifest is read beside it.
    """
    file = directory / "manifest.bin"
    if not sealed and not os.path.lexists(file):
        return SavedRun()
    try:
        manifest = unseal(sealed, verify)
    except ManifestError as error:
        what, _, cure = str(error).partition(": ")
        if not cure.startswith(("update", "use the version")):
            again, new = typed("join --bootstrap ADDRESS"), typed("join --new")
            cure = f"`{again}` joins the run again; `{new}` starts another, and moves these files to past/"
        return SavedRun(problem=f"{file} cannot be used ({what}): {cure}")
    facts = SavedRun(manifest.config.name, manifest.run_id, is_over=is_over(directory))
    try:
        home = home_of(directory)
        decided, is_cut = _certificates(home / "certificates.bin")
        there = places(home / DIRECTORY)
    except StateError as error:
        return replace(facts, problem=str(error))
    except OSError as error:
        return replace(
            facts, problem=f"the run cannot be read ({error.filename}: {error.strerror}): repair the directory"
        )
    damaged: list[str] = []
    newest = None
    for path in reversed(there):
        try:
            newest = described(path) if is_running else _whole(path)
            break
        except CheckpointError as error:
            damaged.append(str(error))
        except OSError as error:
            damaged.append(f"the checkpoint {path} cannot be read ({error.strerror})")
    checkpoint = newest.round if newest else None
    return replace(
        facts,
        decided=decided,
        certificates_are_cut=is_cut and not is_running,
        checkpoint=checkpoint,
        damaged=tuple(damaged),
    )


def _whole(path: Path) -> Checkpoint:
    checkpoint = described(path)
    if checkpoint.bytes <= VERIFY_BYTES:
        return verified(path)
    for name, file in checkpoint.files.items():
        if os.stat(path / name).st_size != file.size:
            raise CheckpointError(f"the checkpoint {path} is damaged: {name} is not what it was")
    return checkpoint


def _certificates(file: Path) -> tuple[int | None, bool]:
    """(number of the first undecided round or None, whether what follows is damaged)"""
    last, read = b"", _MAGIC_BYTES
    try:
        for last in stored(file):
            read += _ENTRY_BYTES + len(last)
        size = file.stat().st_size
    except FileNotFoundError:
        return None, False
    is_cut = read < size
    if not last:
        return None, is_cut
    try:
        return records.decode(wire.expect(wire.decode(last), Certificate).record).round + 1, is_cut
    except BadPayload:
        return None, True
