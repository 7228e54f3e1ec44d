"""The page in a real Chromium: each situation, hostile words and pages, a restart of the peer, the keyboard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser

from tests.browser.chromium import BROWSER, DESKTOP, PHONE, STRANGER, chromium, tab
from tests.browser.views import VIEWS, peer
from tests.support.scripted_page import ScriptedPage
from tests.support.status_examples import REPORT

pytestmark = [
    pytest.mark.real,
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium"),
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_scope="module"),
]

FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
OPAQUE = """async ([stream, act]) => {
  const read = await fetch(stream).then((answer) => answer.text(), (error) => error.name);
  const body = JSON.stringify({ do: "finish" });
  const wish = { method: "POST", mode: "no-cors", body };
  const posted = await fetch(act, wish).then((answer) => answer.type, (error) => error.name);
  return [read, posted];
}"""
"""What a page of another origin can learn of ours: nothing."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


@pytest.mark.parametrize("looks", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_each_view_is_clean_and_fits(tmp_path: Path, browser: Browser, looks: int) -> None:
    """Clean: an empty console, no violation of the content security policy, and nothing that axe-core objects to.

    Args:
        looks: with how many of the two looks axe-core sees each view; with one: by turns.
    """
    for number, (name, view) in enumerate(VIEWS.items()):
        (tmp_path / name).mkdir()
        page = ScriptedPage(tmp_path / name)
        view.set_up(page)
        async with page.serving():
            for look, (size, dark) in enumerate(((DESKTOP, False), (PHONE, True))):
                async with tab(browser, page.link, size, dark) as opened:
                    await opened.headline(view.headline)
                    assert await opened.page.evaluate(FITS), f"{name} scrolls sideways at {size}"
                    assert await opened.page.evaluate("document.images.length") == 1, f"{name} took text as HTML"
                    assert opened.problems == [], name
                    if looks == 1 and look != number % 2:
                        continue
                    found = await Axe().run(opened.page)
                    assert len(found.response["passes"]) > 10 and not found.response["violations"], name


async def test_page_follows_the_peer_through_a_restart(tmp_path: Path, browser: Browser) -> None:
    page, restarted = ScriptedPage(tmp_path), ScriptedPage(tmp_path, incarnation=2)
    page.show(state="training", round=3)
    restarted.show(state="training", round=9)
    restarted.feed.recall([REPORT])
    async with page.serving():
        await_gone = tab(browser, page.link)
        opened = await await_gone.__aenter__()
        await opened.headline("Training round 4")
        assert "#" not in opened.page.url  # the token has left the address bar
    await opened.headline("The peer")
    async with restarted.serving():
        await opened.headline("Training round 10")
        await opened.page.click("#as-table")
        assert await opened.page.locator("#round-rows tr").count() == 1
        await opened.page.reload()
        await opened.headline("Training round 10")
    await await_gone.__aexit__(None, None, None)


async def test_foreign_pages_get_nothing(tmp_path: Path, browser: Browser) -> None:
    page = ScriptedPage(tmp_path)
    other = await asyncio.start_server(_foreign_page, "127.0.0.1", 0)
    foreign = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}/"
    own = "http://127.0.0.1:{}".format
    async with other, page.serving():
        async with tab(browser, foreign) as opened:
            urls = [f"{own(page.port)}/api/stream", f"{own(page.port)}/api/do"]
            read, posted = await opened.page.evaluate(OPAQUE, urls)
            assert read == "TypeError" and posted in ("opaque", "TypeError")
            frame = "url => { const f = document.createElement('iframe'); f.src = url; document.body.append(f); }"
            await opened.page.evaluate(frame, page.link)
            await opened.page.wait_for_timeout(500)
            assert ["Starling" in await each.title() for each in opened.page.frames] == [False, False]
        async with tab(browser, page.link_at(STRANGER)) as opened:
            assert "answers to 127.0.0.1" in await opened.page.inner_text("body")
        async with tab(browser, page.link.partition("#")[0]) as opened:
            await opened.headline("This page needs its link")
        assert page.asked == []


async def test_keyboard_alone_finishes_the_peer(tmp_path: Path, browser: Browser) -> None:
    page = ScriptedPage(tmp_path)
    page.show(state="training")
    async with page.serving(), tab(browser, page.link) as opened:
        await opened.headline("Training")
        keyboard = opened.page.keyboard
        for _ in range(3):  # the link to the peers, then two buttons
            await keyboard.press("Tab")
        await keyboard.press("Enter")
        await opened.page.wait_for_selector("#finish-question:visible")
        await keyboard.press("Escape")
        assert page.asked == []
        await opened.page.focus("#finish")
        for key in ("Enter", "Shift+Tab", "Enter"):  # the question puts the focus on "Stay"
            await keyboard.press(key)
        await opened.page.wait_for_function("() => document.querySelector('#answer').textContent.includes('finishes')")
        assert page.asked == [{"do": "finish"}]


async def test_private_page_makes_tickets_and_asks_before_it_removes(tmp_path: Path, browser: Browser) -> None:
    page = ScriptedPage(tmp_path)
    page.show(state="training", private=True, peers=(peer(1), peer(2)))
    async with page.serving(), tab(browser, page.link) as opened:
        await opened.headline("Training")
        await opened.page.click("summary")
        assert "others need a ticket" in await opened.page.inner_text("#invite-who")
        await opened.page.click("#ticket")
        await opened.page.wait_for_selector("#invite-command:visible")
        assert await opened.page.inner_text("#invite-command") == "starling join starling1abc"
        await opened.page.click("#peer-rows tr:nth-child(2) button")
        assert [each["do"] for each in page.asked] == ["invite"]
        await opened.page.click("text=Remove for good?")
        await opened.page.wait_for_function("() => document.querySelector('#answer').textContent.includes('Removed')")
        assert page.asked[1] == {"do": "revoke", "who": peer(1).peer} and opened.problems == []


async def _foreign_page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve an empty page once."""
    await reader.readline()
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n<title>x</title><body></body>"
    )
    await writer.drain()
    writer.close()
