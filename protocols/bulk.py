"""The methods whose streams carry vectors and states. A node may send them another way than the small messages."""

from __future__ import annotations

BULK_METHODS = frozenset(
    {
        "starling/butterfly/data/1",
        "starling/data-parallel/1",
        "starling/gossip/exchange/1",
        "starling/moshpit/data/1",
        "starling/moshpit/part/1",
        "starling/parameter-server-async/1",
        "starling/parameter-server/1",
        "starling/parts/1",
        "starling/push-sum/share/1",
        "starling/ring/1",
        "starling/stage-outer/1",
        "starling/stage/1",
        "starling/sync/1",
    }
)
"""Names instead of the modules' constants: a run loads only the protocol that it uses."""

CATCH_UP_METHODS = frozenset({"starling/parts/1", "starling/sync/1"})
"""Of these, the methods by which peers fetch what they missed: no round waits for them."""
