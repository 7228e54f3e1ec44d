"""Opens the page in the Chromium of this machine, and notes everything that goes wrong there."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from playwright.async_api import Browser, Page, async_playwright

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
STRANGER = "evil.example"
DESKTOP, PHONE = (1100, 800), (390, 844)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser in which the name `STRANGER` leads to this machine, as after DNS rebinding."""
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", f"--host-resolver-rules=MAP {STRANGER} 127.0.0.1"]
        )
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Tab:
    """An open page.

    Attributes:
        problems: console messages, errors of scripts and violations of the content security policy.
    """

    page: Page
    problems: list[str] = field(default_factory=list)

    async def headline(self, beginning: str) -> None:
        """Wait until the first heading begins with this text."""
        await self.page.wait_for_function(
            "text => document.querySelector('h1')?.textContent.startsWith(text)", arg=beginning, timeout=10_000
        )


@asynccontextmanager
async def tab(browser: Browser, url: str, size: tuple[int, int] = DESKTOP, dark: bool = False) -> AsyncIterator[Tab]:
    """Open a URL in a browser profile of its own."""
    width, height = size
    context = await browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
    )
    opened = Tab(await context.new_page())
    opened.page.on("console", lambda message: opened.problems.append(f"{message.type}: {message.text}"))
    opened.page.on("pageerror", lambda error: opened.problems.append(f"error: {error}"))
    opened.page.on("dialog", lambda dialog: opened.problems.append(f"dialog: {dialog.message}"))
    try:
        await opened.page.goto(url)
        yield opened
    finally:
        await context.close()
