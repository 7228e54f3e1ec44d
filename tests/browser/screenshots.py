"""Draws the page in each situation, as a desktop in light colours and as a phone in dark ones.

python -m tests.browser.screenshots DIRECTORY
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.browser.chromium import DESKTOP, PHONE, chromium, tab
from tests.browser.views import VIEWS
from tests.support.scripted_page import ScriptedPage


async def draw(directory: Path) -> list[Path]:
    """Write the pictures, and create the directory if needed; returns their paths."""
    drawn = []
    async with chromium() as browser:
        for name, view in VIEWS.items():
            with tempfile.TemporaryDirectory() as state_dir:
                page = ScriptedPage(Path(state_dir))
                view.set_up(page)
                async with page.serving():
                    for kind, size, dark in (("desktop", DESKTOP, False), ("phone", PHONE, True)):
                        async with tab(browser, page.link, size, dark) as opened:
                            await opened.headline(view.headline)
                            await opened.page.wait_for_timeout(300)
                            drawn.append(directory / f"{name}-{kind}.png")
                            await opened.page.screenshot(path=drawn[-1], full_page=True)
    return drawn


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.browser.screenshots DIRECTORY")
    for path in asyncio.run(draw(Path(sys.argv[1]))):
        print(path)
