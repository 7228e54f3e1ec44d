"""How the optional dependencies are installed: the one place that words it."""

from __future__ import annotations


def install(extra: str) -> str:
    """The commands that bring an extra of pyproject.toml: page, hf, data or lightning.

    They name the checkout: the project's name on the package index belongs to another project, whose code would run.
    """
    return f"run `make install` in Starling's checkout, or there pip install -e '.[{extra}]'"
