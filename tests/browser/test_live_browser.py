"""The live page of a run that trains in another process: what is new is there within five seconds,
and the reader's place is kept."""

import threading
import time

import browser
import pytest
import small

from flowrl.report.live_page import LivePage, listen

pytestmark = pytest.mark.browser

# newest iteration of the curves, text of the line at the bottom, version of the page, place of the
# reader, how many details are open, samples that are shown
STATE = """
const points = [...document.querySelectorAll(".hit title")].map(t => t.textContent.split(/\\W/)[1]);
const heading = [...document.querySelectorAll("h2")].find(h => /Learning/.test(h.textContent));
const opened = [...document.querySelectorAll("details")].filter(d => d.open).length;
const live = document.querySelector(".live");
return [Math.max(0, ...points), live.textContent, live.dataset.version,
  heading.getBoundingClientRect().top, opened,
  document.querySelector(".samples figure:not([hidden])")?.innerText];
"""


@pytest.fixture
def page(driver, training):
    """The live page, which is shown; the run has begun."""
    process, folder = training
    until(lambda: small.lines(folder) or process.poll() is not None)
    made = LivePage([folder])
    with listen(made, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.look(driver, 800)
        browser.visit(driver, f"http://127.0.0.1:{server.server_port}/")
        yield made
        driver.get("about:blank")
        server.shutdown()


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_new_iteration_is_shown_within_five_seconds_and_the_place_is_kept(driver, training, page):
    written, shown = {}, {}
    driver.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    driver.execute_script("scrollBy(0, arguments[0] - 20)", driver.execute_script(STATE)[3])

    def ended():
        lines = len(small.lines(training[1]))
        newest, said, version, *_ = driver.execute_script(STATE)
        written.setdefault(lines, time.monotonic())
        shown.setdefault(newest, time.monotonic())
        return "mine ended after iteration 21" in said and version == page.version

    until(ended)
    lags = [min(t for n, t in shown.items() if n >= number) - at for number, at in written.items()]
    assert len(lags) > 5 and len(shown) > 2 and max(lags) < 5
    *_, top, opened, samples = driver.execute_script(STATE)
    assert abs(top - 20) < 2 and opened and samples == "Iteration 21"
    messages, asked = browser.heard(driver)
    asked = {url.rpartition("/")[2] for url in asked if not url.startswith("data:")}
    assert not messages and asked == {"", "state"}
