"""What a browser shows of the pages of a run: nothing is pale, small, cut off, there twice or wider
than the window, and filter, slider and videos work."""

import json
import re
import shutil
import threading
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import browser
import finished
import pytest
import torch

from flowrl.data.media import save
from flowrl.report import comparison, comparison_page, run_page
from flowrl.report.live_page import LivePage, listen

pytestmark = pytest.mark.browser

PAGES = ("report", "videos", "comparison", "live", "several")
SEEN = "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility())"


def filmed(folder):
    """A run with three pairs of videos: fixed, broken, and right in both."""
    samples = finished.write(folder) / "samples"
    finished.keep(samples, 3, 64, judged=([0, 1, 1], [1, 0, 1]))
    for stem, i in product(("before", "after"), range(3)):
        save(torch.rand(5, 3, 64, 64), samples / stem / f"{i:02d}.mp4")
    return folder


def repeated(folder, seed):
    """A copy of a run with another seed and another gain."""
    copy = Path(shutil.copytree(folder, folder.parent / f"seed-{seed}"))
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(re.sub("(?m)^seed: .*", f"seed: {seed}", text))
    record = json.loads((copy / "evaluation.json").read_text())
    for entry in record["paired"].values():
        entry["difference"] += seed / 10
    (copy / "evaluation.json").write_text(json.dumps(record))
    return copy


@pytest.fixture(scope="session")
def addresses(trained):
    """Page -> its address."""
    runs = [trained, *(repeated(trained, seed) for seed in (1, 2))]
    compared = comparison.grouped(runs, "algorithm")
    files = {
        "report": trained / "report.html",
        "videos": run_page.build(filmed(trained.parent / "filmed")),
        "comparison": comparison_page.build(compared, trained.parent / "comparison.html"),
    }
    found = {name: file.as_uri() for name, file in files.items()}
    with ExitStack() as stack:
        for name, some in (("live", runs[:1]), ("several", runs)):
            server = stack.enter_context(listen(LivePage(some), 0))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            found[name] = f"http://127.0.0.1:{server.server_port}/"
        yield found


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_whole_and_legible_everywhere_and_ask_for_nothing_else(driver, addresses, page):
    browser.visit(driver, addresses[page])
    driver.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    for width in browser.WIDTHS:
        for theme in browser.THEMES:
            browser.look(driver, width, theme)
            assert not browser.faults(driver), (width, theme)
    messages, asked = browser.heard(driver)
    own = {addresses[page], addresses[page] + "state"}
    assert not messages and {url for url in asked if not url.startswith("data:")} <= own


def test_the_filter_shows_the_pairs_of_its_kind_and_always_the_broken_ones(driver, addresses):
    driver.get(addresses["videos"])
    for kind, shown in {
        "fixed": {"fixed", "broken"},
        "same": {"same", "broken"},
        "broken": {"broken"},
        "all": {"fixed", "broken", "same"},
    }.items():
        driver.find_element("css selector", f".filter [value={kind}]").click()
        pairs = driver.execute_script(SEEN, ".pair")
        assert {pair.get_attribute("class").split()[1] for pair in pairs} == shown


def test_the_slider_changes_the_picture(driver, addresses):
    driver.get(addresses["live"])
    (slider,) = driver.execute_script(SEEN, ".samples input[type=range]")
    shown = []
    for key in ("\ue011", "\ue014", "\ue010"):  # home, right, end
        slider.send_keys(key)
        (figure,) = driver.execute_script(SEEN, ".samples figure")
        shown.append(figure.text)
    assert shown == ["Iteration 1", "Iteration 3", "Iteration 21"]


def test_videos_play_in_each_pair(driver, addresses):
    driver.get(addresses["videos"])
    videos = driver.execute_script(SEEN, ".pair video")
    assert len(videos) == 6
    for video in videos:
        driver.execute_async_script("arguments[0].play().then(arguments[1], arguments[1])", video)
        first = video.get_property("currentTime")
        time.sleep(0.15)
        assert video.get_property("currentTime") != first
