"""For a training loop of one's own: `from starling_node import Swarm`. See docs/own-loop.md."""

from node.library.parameters import SwarmError
from node.library.swarm import StepResult, Swarm

__all__ = ["StepResult", "Swarm", "SwarmError"]
