"""The protocols by name, as `protocols.choices` lists them. Importing this module imports PyTorch."""

from collections.abc import Callable

from protocols.base import Host, IndependentAverager, Settings
from protocols.baselines.registry import data_parallel, parameter_server, parameter_server_async, ring
from protocols.butterfly.averager import Butterfly
from protocols.moshpit.averager import Moshpit
from protocols.pairwise.gossip import Gossip
from protocols.pairwise.push_sum import PushSum

REPLICATED_PROTOCOLS: dict[str, type[Butterfly]] = {"butterfly": Butterfly}
"""The protocols with replicated state, by name."""

INDEPENDENT_PROTOCOLS: dict[str, Callable[[Host, Settings], IndependentAverager]] = {
    "gossip": Gossip,
    "moshpit": Moshpit,
    "push_sum": PushSum,
    "data_parallel": data_parallel,
    "ring": ring,
    "parameter_server": parameter_server,
    "parameter_server_async": parameter_server_async,
}
"""The protocols with independent state, by name."""
