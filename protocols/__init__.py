"""How peers agree. Knows nothing of processes, sockets, threads or time: see `protocols.base`."""

from collections.abc import Callable

from protocols.base import Host, Settings
from protocols.butterfly import Butterfly

PROTOCOLS: dict[str, Callable[[Host, Settings], Butterfly]] = {"butterfly": Butterfly}
"""Every protocol by its name."""
