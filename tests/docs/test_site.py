"""The documentation's site (`make site`): strict, without requests to other hosts, accessible."""

import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.browser import Browser

import agentrl

ROOT = Path(__file__).parents[2]
VERSION = agentrl.__version__
LONG = ("docs/config/", "api/")
slow = pytest.mark.slow
LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?(https?:[^\s\">]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("site")
    command = [sys.executable, ROOT / "site/build.py", output]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


@pytest.fixture(scope="module")
def address(site):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


def test_every_page_is_in_the_navigation(site):
    first = (site / VERSION / "index.html").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        place = "docs/" if page.stem == "index" else f"docs/{page.stem}/"
        assert f'href="{place}"' in first or f"href={place}" in first, page.name


def test_the_reference_has_every_public_name(site):
    text = (site / VERSION / "api/index.html").read_text()
    for name in agentrl.__all__:
        assert re.search(rf'id="agentrl\.[\w.]+\.{name}"', text), name


def test_no_page_loads_anything_from_another_host(site):
    pages = [*(site / VERSION).rglob("*.html")]
    assert len(pages) > 40
    assert not [(p, found) for p in pages if (found := LOADED.findall(p.read_text()))]


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "place", ["", "docs/environments/", *(pytest.param(p, marks=slow) for p in LONG)]
)
def test_pages_fit_and_axe_finds_nothing_serious(page, address, place, scheme):
    colors = [{"name": "prefers-color-scheme", "value": scheme}]
    page.send("Emulation.setEmulatedMedia", features=colors)
    # The colors of a scheme do not depend on the width, nor the layout on the scheme.
    for width in (400, 1000, 1600) if scheme == "light" else (1000,):
        page.resize(width)
        page.send("Page.navigate", url=f"{address}/{VERSION}/{place}")
        page.wait("document.readyState == 'complete' && document.querySelector('h1') !== null")
        assert page.run("document.documentElement.scrollWidth") <= width
        if width == 1000 or not place:
            assert page.grave_violations() == []


@pytest.mark.browser
def test_the_search_finds_a_page(page, address):
    page.resize(1600)
    page.send("Page.navigate", url=f"{address}/{VERSION}/")
    page.wait("document.querySelector('input.md-search__input') !== null")
    page.run("document.querySelector('input.md-search__input').focus(); 0")
    page.wait("document.activeElement.matches('input.md-search__input')")
    page.send("Input.insertText", text="staleness")
    page.wait("document.querySelector('.md-search-result__link') !== null")
    assert "async" in page.run("document.querySelector('.md-search-result__list').innerHTML")
