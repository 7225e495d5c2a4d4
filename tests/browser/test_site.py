"""The built documentation in a browser: nothing is cut off or wider than the window, no link is
dead, and every page is within two clicks of home."""

import functools
import http.server
import importlib.util
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import browser
import pytest
from pages import PAGES, ROOT

pytestmark = pytest.mark.browser

START = ("", "install/", "quickstart/", "coming_from/", "recipes/", "rewards/")
MATHS = ("algorithms/flow_grpo/", "algorithms/nft/", "concepts/")
FAULTS = (Path(__file__).parent / "site.js").read_text(encoding="utf-8")
LINKS = "return [...document.querySelectorAll(arguments[0])].map(a => a.href)"
SCHEME = "return document.body.dataset.mdColorScheme"
ANCHORS = "return [...document.querySelectorAll('[id]')].map(e => e.id)"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Address of the site, built with warnings as errors. Without mkdocs: failed in CI, else
    skipped."""
    if None in map(importlib.util.find_spec, ("mkdocs", "latex2mathml")):
        why = "there is no mkdocs or no latex2mathml: make docs installs them"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPage:
    """What a browser saw of one page."""

    faults: dict[tuple[int, str], list[str]]  # (width, theme) -> sentences; those without: left out
    schemes: dict[str, str]  # theme -> colour scheme of the page
    messages: list[str]  # of the console
    asked: set[str]  # addresses that the page loaded
    links: set[str]  # of the whole page
    text_links: set[str]  # of its text alone
    anchors: set[str]  # ids in the page


def see(driver, address):
    """Show a page once, at every width and in both themes."""
    faults, schemes = {}, {}
    browser.visit(driver, address)
    for width, theme in product((400, 1280), browser.THEMES):
        browser.look(driver, width, theme)
        schemes[theme] = driver.execute_script(SCHEME)
        if found := driver.execute_script(FAULTS):
            faults[width, theme] = found[:5]
    links, text_links = (
        set(driver.execute_script(LINKS, where)) for where in ("a[href]", "article a[href]")
    )
    messages, asked = browser.heard(driver)
    return SeenPage(
        faults=faults,
        schemes=schemes,
        messages=messages,
        asked=asked,
        links=links,
        text_links=text_links,
        anchors=set(driver.execute_script(ANCHORS)),
    )


@pytest.fixture(scope="session")
def seen(driver, site):
    """Address of every page -> what was seen of it."""
    names = [page.removeprefix("docs/") for page in PAGES if page != "README.md"]
    paths = [re.sub(r"(^|/)index\.md$|\.md$", r"\1", name) for name in names]
    paths = [path if path in ("", "algorithms/") else f"{path}/" for path in paths]
    return {address: see(driver, address) for address in (urljoin(site, p) for p in paths)}


def test_no_page_is_cut_off_or_breaks_a_key_or_has_a_picture_without_words(seen):
    assert not {address: page.faults for address, page in seen.items() if page.faults}
    assert len(seen) > 60


def test_pages_are_light_or_dark_as_the_reader_chose(seen):
    assert all(page.schemes == {"light": "default", "dark": "slate"} for page in seen.values())


def test_no_page_writes_to_the_console_or_loads_from_elsewhere(site, seen):
    assert not {address: page.messages for address, page in seen.items() if page.messages}
    own = (site, "data:", "blob:")
    asked = set().union(*(page.asked for page in seen.values()))
    assert asked and all(url.startswith(own) for url in asked)


def test_no_link_inside_the_site_is_dead(site, seen):
    dead = set()
    for address, page in seen.items():
        for link in page.links:
            target, anchor = urldefrag(link)
            there = seen.get(target)
            if target.startswith(site) and (
                there is None or (anchor and unquote(anchor) not in there.anchors)
            ):
                dead.add((address, link))
    assert not dead


def test_every_page_is_within_two_clicks_of_the_text_of_home(site, seen):
    near = {site}
    for _ in range(2):
        near |= {urldefrag(link)[0] for page in near & set(seen) for link in seen[page].text_links}
    assert not set(seen) - near


@pytest.mark.parametrize("page", [*START, *MATHS])
def test_start_pages_and_equations_are_legible(driver, site, page):
    for theme in browser.THEMES:
        browser.look(driver, 1280, theme)
        browser.visit(driver, urljoin(site, page))
        pale = [fault for fault in browser.faults(driver) if fault.startswith("contrast of text")]
        assert not pale, theme


@pytest.mark.parametrize("page", MATHS)
def test_equations_are_drawn_without_a_script(driver, site, page):
    driver.get(urljoin(site, page))
    assert driver.find_elements("css selector", "article .equation math[display=block]")
