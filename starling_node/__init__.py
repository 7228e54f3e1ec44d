"""Starling's one top-level name in an environment, and the program `starling`.

In a wheel, the packages `node` and `protocols` lie in the folder `code` beside this file. Importing this module puts
that folder first on the path: `import node` then means ours, whatever the working directory holds. In a checkout there
is no such folder, and nothing to put.

    from starling_node import Swarm      # for a loop of one's own, in a wheel and in a checkout: docs/own-loop.md
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from node.library import StepResult as StepResult
    from node.library import Swarm as Swarm
    from node.library import SwarmError as SwarmError
    from node.library.accelerate import AcceleratedSwarm as AcceleratedSwarm
    from node.library.lightning import LightningSwarm as LightningSwarm
    from node.library.transformers import SwarmCallback as SwarmCallback
    from node.tasks.base import TaskContext as TaskContext

_CODE = Path(__file__).parent / "code"
_OF_USERS = {
    "Swarm": "node.library",
    "StepResult": "node.library",
    "SwarmError": "node.library",
    "SwarmCallback": "node.library.transformers",
    "AcceleratedSwarm": "node.library.accelerate",
    "LightningSwarm": "node.library.lightning",
    "TaskContext": "node.tasks.base",
}
"""Names for scripts and tasks of users -> their modules, which are imported when a name is used."""


def __getattr__(name: str) -> Any:
    if name not in _OF_USERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OF_USERS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_USERS})


def main() -> NoReturn:
    """The command `starling`."""
    from node.__main__ import main as run

    run()


def _put_first() -> None:
    for name in ("node", "protocols"):
        place = getattr(sys.modules.get(name), "__file__", None)
        if name in sys.modules and (place is None or _CODE not in Path(place).parents):
            raise ImportError(
                f"another module `{name}` is imported already ({place or 'a folder'}), and Starling has one of that "
                "name: import starling_node first, or rename yours"
            )
    sys.path.insert(0, str(_CODE))


if _CODE.is_dir():
    _put_first()
