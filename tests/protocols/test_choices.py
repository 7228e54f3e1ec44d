"""The names that a configuration chooses from, against the code that they name."""

from __future__ import annotations

from node.training.stage_learner import _DTYPES
from protocols import choices, registry
from protocols.vectors.codec import CODECS
from protocols.vectors.robust import RULES


def test_each_name_has_its_code_and_no_code_lacks_a_name() -> None:
    assert tuple(registry.REPLICATED_PROTOCOLS) == choices.REPLICATED_PROTOCOLS
    assert tuple(registry.INDEPENDENT_PROTOCOLS) == choices.INDEPENDENT_PROTOCOLS
    assert tuple(CODECS) == choices.CODECS and tuple(RULES) == choices.ROBUST_RULES
    assert {name: each.itemsize for name, each in _DTYPES.items()} == choices.ACTIVATION_CODECS
    assert {each.name: each.grain for each in CODECS.values() if each.grain > 1} == {"topk": choices.TOPK_GRAIN}
