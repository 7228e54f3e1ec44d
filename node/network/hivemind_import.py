"""Import hivemind without the modules that only its trainers need. Import this module before any part of hivemind.

hivemind's `__init__.py` imports optimisers, experts, and SciPy and pydantic for them: 500 modules that a peer does not
use. They cost 0.7 s of a peer's start and 38 MB. This module registers the package without running its `__init__.py`,
so submodules are loaded on request. An access to a name of the package itself (`hivemind.DHT`) still runs it.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if part := sys.modules.get(f"{self.__name__}.{name}"):  # requested while it is still being loaded
            return part
        if name.startswith("__") or "_entered" in self.__dict__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self._entered = True
        assert self.__spec__ and self.__spec__.loader
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def enter(package: str) -> None:
    if package not in sys.modules and (spec := find_spec(package)):
        module = module_from_spec(spec)
        module.__class__ = _Package
        sys.modules[package] = module


enter("hivemind")
