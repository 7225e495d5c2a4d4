"""The built documentation: no link is dead, every page is within two clicks of home, and in a
browser nothing is cut off, pale or wider than the window."""

import functools
import html.parser
import http.server
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import browser
import pytest
from pages import PAGES, ROOT
from selenium.webdriver.support.ui import WebDriverWait

pytestmark = pytest.mark.browser

START = (
    *("", "install/", "quickstart/", "what_happened/", "coming_from/", "recipes/"),
    *("train/flux/", "train/sdxl/", "choose_reward/", "troubleshooting/"),
)
MATHS = ("algorithms/flow_grpo/", "algorithms/opd/", "concepts/")
# long tables, long names; pages that are made from code
WIDE = ("algorithms/", "results/", "budget/", "reading/", "configuration/train/", "api/")
FAULTS = (Path(__file__).parent / "site.js").read_text(encoding="utf-8")
SCHEME = "return document.body.dataset.mdColorScheme"
# A colour or a box that is still on its way to the new theme or width would be measured half-way.
AT_ONCE = """
const style = document.createElement("style");
style.textContent =
  "*, ::before, ::after { transition: none !important; animation: none !important }";
document.head.append(style);
"""
OWN_SCHEMES = ("data:", "blob:")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class BuiltPage(html.parser.HTMLParser):
    """What the HTML of a page holds.

    links: addresses of the whole page; text_links: of its text alone; anchors: its ids;
    wordless: sources of its pictures without alternative text.
    """

    def __init__(self, address, source):
        super().__init__()
        self.address, self.inside = address, 0  # how many <article> are open
        self.links, self.text_links, self.anchors, self.wordless = set(), set(), set(), []
        self.feed(source)

    def handle_starttag(self, tag, pairs):
        attributes = dict(pairs)
        self.inside += tag == "article"
        if found := attributes.get("id"):
            self.anchors.add(found)
        if tag == "a" and (target := attributes.get("href")):
            link = urljoin(self.address, target)
            self.links.add(link)
            if self.inside:
                self.text_links.add(link)
        if tag == "img" and not attributes.get("alt"):
            self.wordless.append(attributes.get("src"))

    def handle_endtag(self, tag):
        self.inside -= tag == "article"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The site, built with warnings as errors. Without mkdocs: failed in CI, else skipped."""
    if None in map(importlib.util.find_spec, ("mkdocs", "latex2mathml")):
        why = "there is no mkdocs or no latex2mathml: make docs installs them"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    built = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return built


@pytest.fixture(scope="session")
def site(folder):
    """Address of the site, which a server of this process answers."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def built(folder):
    """Address of every page, on a host "site" -> what its HTML holds."""
    found = {}
    for path in folder.rglob("*.html"):
        address = f"http://site/{path.relative_to(folder).as_posix().removesuffix('index.html')}"
        found[address] = BuiltPage(address, path.read_text(encoding="utf-8"))
    return {address: page for address, page in found.items() if not address.endswith("404.html")}


def test_every_page_is_built_and_every_picture_has_words(built):
    assert len(built) == len(PAGES) - 1  # the README is none
    assert not {address: page.wordless for address, page in built.items() if page.wordless}


def test_no_link_inside_the_site_is_dead(built, folder):
    dead = set()
    for address, page in built.items():
        for link in page.links:
            target, anchor = urldefrag(link)
            path = target.removeprefix("http://site/")
            if target in built:
                if anchor and unquote(anchor) not in built[target].anchors:
                    dead.add((address, link))
            elif path != target and not (folder / unquote(path)).is_file():
                dead.add((address, link))
    assert not dead


def test_every_page_is_within_two_clicks_of_the_text_of_home(built):
    near = {"http://site/"}
    for _ in range(2):
        near |= {
            urldefrag(link)[0] for page in near & set(built) for link in built[page].text_links
        }
    assert not set(built) - near


def has_scheme(scheme, driver):
    return driver.execute_script(SCHEME) == scheme


@pytest.mark.parametrize("page", [*START, *MATHS, *WIDE])
def test_a_page_is_whole_and_legible_at_both_widths_in_both_themes(driver, site, page):
    """Its layout at two widths, its contrast in two themes (of start pages at both widths), the
    colours that the reader's system asks for, the console, and that nothing comes from outside."""
    faults = {}
    browser.look(driver, 1280)
    browser.visit(driver, urljoin(site, page))
    driver.execute_script(AT_ONCE)
    for width in (400, 1280):
        browser.look(driver, width)
        faults[width] = driver.execute_script(FAULTS)
    for theme, scheme in zip(browser.THEMES, ("default", "slate"), strict=True):
        for width in (1280, 400) if page in START else (1280,):
            browser.look(driver, width, theme)
            WebDriverWait(driver, 10).until(functools.partial(has_scheme, scheme))
            found = browser.faults(driver)
            faults[theme, width] = [f for f in found if f.startswith("contrast of text")]
    assert not {where: found[:8] for where, found in faults.items() if found}
    messages, asked = browser.heard(driver)
    assert not messages
    assert asked and all(url.startswith((site, *OWN_SCHEMES)) for url in asked)
    drawn = driver.find_elements("css selector", "article .equation math[display=block]")
    assert drawn or page not in MATHS
