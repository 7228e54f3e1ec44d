from tests.node.network.conftest import directory, make

__all__ = ["directory", "make"]
