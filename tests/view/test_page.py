"""The page in a browser: what it shows, and that hostile texts stay texts."""

from __future__ import annotations

import threading

import pytest
from support.browser import Browser
from support.needs import needs_browser
from support.recorded import write_run

from agentrl.view.app import ViewServer

pytestmark = [pytest.mark.browser, needs_browser]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folders = [write_run(tmp_path_factory.mktemp(name)) for name in ("first", "second")]
    server = ViewServer(folders, "127.0.0.1", 0, "secret")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    browser = Browser(tmp_path_factory.mktemp("profile"))
    browser.send("Page.navigate", url=server.address)
    browser.wait("document.body && document.body.dataset.ready === 'yes'")
    yield browser
    browser.close()
    server.should_exit = True
    thread.join(10)


def visit(page: Browser, address: str) -> str:
    """Open a page by its address and return its text."""
    page.run(f"document.body.dataset.ready = ''; location.hash = {address!r}; 0")
    page.wait("document.body.dataset.ready === 'yes'")
    return page.run("document.getElementById('main').innerText")


PAGES = (
    "#/?",
    "#/run/0?q=calls%3E0",
    "#/run/0/step/2",
    "#/run/0/episode?id=e2-0-1",
    "#/run/0/episode?id=..%2F..%2Fx",
)


def test_questions_are_answered(page):
    runs = visit(page, "#/?")
    assert "2 runs" in runs and "0.75 ± 0.25" in runs and "critic/score/mean" in runs
    # Which rollout of group 1 called no tool, and which one timed out?
    assert "2 episodes; 1 to 2" in visit(page, "#/run/0?q=step%3D1 group%3D1 calls%3D0")
    timed_out = visit(page, "#/run/0?q=tool%3Dsearch error%3Dtimeout")
    assert "e1-0-0" in timed_out and "e1-0-1" not in timed_out
    assert "tool is one of: calc, search" in visit(page, "#/run/0?q=tool%3Dserch")
    # Which token of step 2 had the largest gap?
    assert "-1 nats: token 1 of e2-0-1" in visit(page, "#/run/0/step/2")
    # What did it learn from? Unknown is not 0.
    visit(page, "#/run/0/episode?id=e2-0-1&token=1")
    rows = page.run("[...document.querySelectorAll('#tokens .row')].map(r => r.innerText)")
    cells = [row.split() for row in rows]
    assert " ".join(cells[0]) == "turn 0 0 ? 1 -0.5 -0.5 0 0 0 ? 1"
    assert " ".join(cells[1]) == "turn 0 1 ? 2 -0.25 -1.25 -1 2 1 ? 1"
    assert " ".join(cells[2]) == "not sampled 2 ? 3 ? ? ? ? ? ? ?"
    assert page.run("document.querySelector('#tokens .chosen').innerText").split()[2] == "1"
    calls = visit(page, "#/run/0/episode?id=e1-0-0")
    assert "timeout, 500 ms" in calls and "advantage ?" in calls


def test_nothing_of_a_hostile_run_executes(page):
    text = visit(page, "#/run/0/episode?id=..%2F..%2Fx")
    assert "<script>window.ran=1</script>" in text and "\\x1b[31mred" in text
    assert "\\u202eevil" in text and "\\x00" in text and "\x1b" not in text
    assert page.run(
        "window.ran === undefined && document.querySelectorAll('main img').length === 0"
    )
    assert page.run("document.scripts.length") == 1
    assert not page.errors


@pytest.mark.parametrize("width", [400, 1000, 1600])
def test_no_page_is_wider_than_the_window(page, width):
    page.resize(width)
    for address in PAGES:
        visit(page, address)
        assert page.run("document.documentElement.scrollWidth") <= width, address


def test_the_keyboard_reaches_search_and_links(page):
    visit(page, "#/run/0?q=step%3D1")
    for key in ("/", "Escape"):
        page.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=key[:1])
    assert page.run("document.activeElement.id") == "query"
    page.run("document.activeElement.blur(); 0")
    page.send("Input.dispatchKeyEvent", type="keyDown", key="j", text="j")
    assert page.run("document.activeElement.getAttribute('href')") == "#/run/0/step/1"
