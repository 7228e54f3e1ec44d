"""The names that a configuration chooses from, against the code that they name."""

from __future__ import annotations

from node.training import activations
from protocols import registry
from protocols.registry import load_averager
from protocols.vectors.codec import CODECS
from protocols.vectors.robust import RULES


def test_each_name_has_its_code_and_no_code_lacks_a_name() -> None:
    protocols = (*registry.REPLICATED_PROTOCOLS, *registry.INDEPENDENT_PROTOCOLS)
    assert len({load_averager(name) for name in protocols}) == len(protocols)
    assert tuple(CODECS) == registry.CODECS and tuple(RULES) == registry.ROBUST_RULES
    assert activations.CODECS.keys() == registry.ACTIVATION_CODECS.keys()
    assert {each.name: each.grain for each in CODECS.values() if each.grain > 1} == {"topk": registry.TOPK_GRAIN}
