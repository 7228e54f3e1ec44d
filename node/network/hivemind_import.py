"""hivemind without what it imports for its own trainers: import this before any part of it.

Its package imports all there is: optimisers, experts, and SciPy and pydantic for them, 500 modules that nothing of
ours uses: .7 s of a peer's start, and 38 MB. Entered without its own first file, its parts are loaded as they are asked
for; whoever asks for a name of the package itself (`hivemind.DHT`) gets the whole of it after all.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """A package whose first file is run when somebody asks for what only that can know."""

    def __getattr__(self, name: str) -> Any:
        if part := sys.modules.get(f"{self.__name__}.{name}"):  # asked for while it is still being loaded
            return part
        if name.startswith("__") or "_entered" in self.__dict__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self._entered = True
        assert self.__spec__ and self.__spec__.loader
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def enter(package: str) -> None:
    """Make this package's parts importable without its first file, unless it is imported already, or is not there."""
    if package not in sys.modules and (spec := find_spec(package)):
        module = module_from_spec(spec)
        module.__class__ = _Package
        sys.modules[package] = module


enter("hivemind")
