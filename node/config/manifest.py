"""The manifest: a run's configuration, founder and initial state. Its hash is the run id; the founder signs it.

A joiner gets the manifest in an envelope from any peer. With the run id from the join line, the joiner can verify
all of it. Without the id, the founder's signature at least says whose run it is.

    envelope      msgpack [FORMAT, canonical bytes, signature]
    run id        SHA-256 of a prefix and the canonical bytes, 64 hex digits
    signature     the founder's, over another prefix and the canonical bytes
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated

import msgpack
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from node.config.run_config import RunConfig
from node.config.task_tables import STRICT
from node.config.toml import MAX_BYTES, canonical, one_line
from node.tasks.hf.settings import ModelPins
from node.tasks.name import LOOP
from node.tasks.recipe import MAX_ELEMENTS, MAX_FRAGMENTS
from protocols.base import RUN_SCOPE, Layout, Member, PeerId, Signer, stage_scope

FORMAT = 2
_RUN_TAG = b"starling run 1\n"
_SIGNED_TAG = b"starling manifest 1\n"
_MAX_PEER_CHARACTERS = 128
_MAX_INCARNATION = 1 << 40
_MIN_RUN_ID_DIGITS = 12

Digest = Annotated[bytes, Field(min_length=32, max_length=32)]


class ManifestError(ValueError):
    """A manifest that is refused. The message is one line: what, why, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class StageEntry:
    """One stage of a run with stages."""

    end: int = Field(ge=1, le=1 << 20)  # first block that is not in the stage, which begins where the one before ends
    state_root: Digest  # of its outer state before round 0
    layout: Digest  # `layout_digest` of its parameters
    # of a microbatch, as a share of that in the costliest stage, as the founder has measured it; None if all are equal
    cost: float | None = Field(default=None, ge=1e-3, le=1.0)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Manifest:
    """A run, as declared by its founder. Raises ValueError if a value is out of its range."""

    config: RunConfig
    founder: Member  # in the incarnation that founded the run
    # Length of each fragment's flat vector; with stages, of each stage's.
    elements: tuple[Annotated[int, Field(ge=1, le=MAX_ELEMENTS)], ...] = Field(min_length=1, max_length=MAX_FRAGMENTS)
    state_root: Digest  # of the outer state before round 0; with stages, that of stage 0
    held_out: Digest = bytes(32)  # SHA-256 of the evaluation sample; zeros if the task has none
    created: float = Field(ge=0, le=1e11)  # wall time, seconds since 1970
    layout: Digest | None = None  # `layout_digest` of the parameters; None with stages, each of which has its own
    stages: tuple[StageEntry, ...] | None = Field(default=None, max_length=MAX_FRAGMENTS)
    model: ModelPins | None = None  # what the model of a run of the task hf must be

    def __post_init__(self) -> None:
        peer, incarnation = self.founder.peer, self.founder.incarnation
        if not 0 < len(peer) <= _MAX_PEER_CHARACTERS or not (peer.isascii() and peer.isprintable()):
            raise ValueError("the founder's peer id is malformed")
        if not 0 <= incarnation <= _MAX_INCARNATION:
            raise ValueError(f"the founder's incarnation must be in 0..{_MAX_INCARNATION}")
        total = sum(self.elements)
        if self.config.elements not in (None, total):
            raise ValueError(f"the task takes {self.config.elements} elements, the manifest has {total}")
        if total > MAX_ELEMENTS:
            raise ValueError(f"the manifest has {total} elements, more than {MAX_ELEMENTS}")
        if total < self.config.recipe.fragment_count:
            raise ValueError(f"{total} parameters cannot be averaged in {self.config.recipe.fragment_count} fragments")
        if (self.model is None) != (self.config.hf is None):
            raise ValueError("a manifest describes a model if, and only if, the run's task is hf")
        self._check_stages()

    def _check_stages(self) -> None:
        stages = self.stages or ()
        if (len(stages) or 1) != self.config.stages or (stages and len(self.elements) != len(stages)):
            count = self.config.stages if self.config.stages > 1 else "no"
            raise ValueError(f"the run has {count} stages, the manifest describes {len(stages)}")
        bounds = self.bounds
        if any(low >= high for low, high in pairwise(bounds)):
            raise ValueError("the stages' blocks are not in order")
        if stages and self.config.gpt and bounds[-1] != self.config.gpt.layers + 2:
            raise ValueError(f"the stages have {bounds[-1]} blocks, the model has {self.config.gpt.layers + 2}")
        if stages and stages[0].state_root != self.state_root:
            raise ValueError("the state root is not that of stage 0")

    @property
    def bounds(self) -> tuple[int, ...]:
        """First block of each stage, and the number of blocks: S + 1 numbers; (0,) in a run without stages."""
        return (0, *(stage.end for stage in self.stages or ()))

    def scope(self, stage: int) -> str:
        """The scope in which a stage's replicas average; in a run without stages, that of all peers."""
        return stage_scope(stage) if self.stages else RUN_SCOPE

    def elements_of(self, stage: int) -> tuple[int, ...]:
        """Length of each fragment of a stage; of the whole model in a run without stages."""
        return (self.elements[stage],) if self.stages else self.elements

    def root_of(self, stage: int) -> bytes:
        """State root of a stage's outer state before round 0, 32 bytes."""
        return self.stages[stage].state_root if self.stages else self.state_root

    @property
    def costs(self) -> tuple[float, ...]:
        """Of a microbatch in each stage, in any unit."""
        return tuple(stage.cost or 1.0 for stage in self.stages or ())

    @property
    def run_id(self) -> str:
        """Hash of the manifest, 64 hex digits; as bytes it is `protocols.base.RoundKey.run`."""
        return hashlib.sha256(_RUN_TAG + self.encode()).hexdigest()

    def require_layout(self, layout: Layout, stage: int = 0) -> None:
        """Raise ManifestError unless this peer's worker has the parameters of the run, or of its stage."""
        elements, digest = self.elements_of(stage), self.stages[stage].layout if self.stages else self.layout
        if layout.sizes() == elements and digest in (None, layout_digest(layout)):
            return
        what = f"{layout.sizes()} parameters, in this run {elements}"
        if layout.sizes() == elements:
            what = "other tensors than in this run"
        own = self.config.own_task
        if self.config.hf:
            raise ManifestError(
                f"on this machine the model has {what}: use the versions of transformers and peft that others use"
            )
        if self.config.task == LOOP:
            raise ManifestError(f"the script's model has {what}: use the model, and its names, that the others use")
        version = f"version of {own.partition(':')[0]}" if own else "version of Starling"
        raise ManifestError(f"on this machine the model has {what}: use the {version} that the others use")

    def encode(self) -> bytes:
        return canonical(self)


_MANIFEST = TypeAdapter(Manifest)


def layout_digest(layout: Layout) -> bytes:
    """SHA-256 of names and shapes, in order. Different tensors may have equal sizes, so sizes alone do not suffice."""
    return hashlib.sha256(json.dumps(layout.fragments, separators=(",", ":")).encode("ascii")).digest()


def seal(manifest: Manifest, signer: Signer) -> bytes:
    """Sign a manifest and wrap it in its envelope, at most `MAX_BYTES` long. The signer is the founder."""
    encoded = manifest.encode()
    envelope: bytes = msgpack.packb([FORMAT, encoded, signer.sign(_SIGNED_TAG + encoded)])
    return envelope


def unseal(
    envelope: bytes, verify: Callable[[PeerId, bytes, bytes], bool], expected_run_id: str | None = None
) -> Manifest:
    """Verify an envelope from an untrusted peer, and return its manifest. Raises ManifestError.

    `expected_run_id` is the id of the expected run, or at least its first 12 hex digits; None accepts any run.
    """
    encoded, signature = _open(envelope)
    unsigned = ManifestError("the manifest is not signed by its founder: ask another peer of the run")
    try:
        manifest = _decode(encoded)
    except ManifestError:  # if the signature is wrong too, report that: a flipped bit is not another version
        if (founder := _founder(encoded)) and not verify(founder, _SIGNED_TAG + encoded, signature):
            raise unsigned from None
        raise
    if not verify(manifest.founder.peer, _SIGNED_TAG + encoded, signature):
        raise unsigned
    if expected_run_id is not None and not _matches(manifest.run_id, expected_run_id):
        raise ManifestError(
            f"this is run {manifest.run_id}, not {ascii(expected_run_id[:64])[1:-1]}: "
            "take the join line from a peer of the run that you want to join"
        )
    return manifest


def _matches(run_id: str, expected: str) -> bool:
    return len(expected) >= _MIN_RUN_ID_DIGITS and run_id.startswith(expected.lower())


def _open(envelope: bytes) -> tuple[bytes, bytes]:
    """Encoded manifest and signature, neither of them verified yet."""
    if len(envelope) > MAX_BYTES:
        raise ManifestError(f"an envelope of {len(envelope)} bytes, more than {MAX_BYTES}: it holds no manifest")
    try:
        opened = msgpack.unpackb(envelope, max_ext_len=0, max_map_len=0, max_array_len=3)
    except (ValueError, msgpack.UnpackException):
        raise ManifestError("the envelope is damaged: ask another peer of the run") from None
    if type(opened) is not list or len(opened) != 3 or type(opened[0]) is not int:
        raise ManifestError("the envelope holds no manifest: ask another peer of the run")
    version, encoded, signature = opened
    if version != FORMAT:
        remedy = "update Starling" if version > FORMAT else "use the version that founded this run"
        raise ManifestError(f"the manifest has format {version}, this version reads {FORMAT}: {remedy}")
    if type(encoded) is not bytes or type(signature) is not bytes or msgpack.packb(opened) != envelope:
        raise ManifestError("the envelope is not in its canonical spelling: ask another peer of the run")
    return encoded, signature


def _founder(encoded: bytes) -> PeerId:
    """The founder's peer id in a manifest that does not decode; empty if there is no valid one."""
    try:
        peer = json.loads(encoded)["founder"]["peer"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    valid = isinstance(peer, str) and len(peer) <= _MAX_PEER_CHARACTERS and peer.isascii() and peer.isprintable()
    return peer if valid else ""


def _decode(encoded: bytes) -> Manifest:
    try:
        manifest = _MANIFEST.validate_json(encoded)
    except ValidationError as error:
        why = f"this version does not accept the manifest: {one_line(error)}"
        raise ManifestError(f"{why}; update Starling, or ask another peer of the run") from None
    if manifest.encode() != encoded:
        raise ManifestError("the manifest is not in its canonical spelling: ask another peer of the run")
    return manifest
