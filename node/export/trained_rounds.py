"""How many rounds have trained a checkpoint. Only its peer's chain knows that: the checkpoint numbers all rounds."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from node.storage.certificate_log import stored
from node.storage.checkpoint import Checkpoint
from protocols import wire
from protocols.base import BadPayload
from protocols.consensus import record as records
from protocols.consensus.messages import Certificate


def trained_rounds(directory: Path, checkpoint: Checkpoint) -> int:
    """Count the rounds before a checkpoint, without those for which nothing was trained, as `Chain.trained` does.

    It reads the chain in a peer's state directory and verifies no votes. If that chain does not lead to the
    checkpoint, or cannot be read, all rounds count.
    """
    idle, lineage = 0, b""
    try:
        for encoded in islice(stored(directory / "certificates.bin"), checkpoint.round):
            certificate = wire.expect(wire.decode(encoded), Certificate)
            record = records.decode(certificate.record)
            idle += record.idle
            lineage = records.lineage(certificate.record)
    except (OSError, BadPayload, ValueError):
        return checkpoint.round
    return checkpoint.round - idle if lineage == checkpoint.lineage else checkpoint.round
