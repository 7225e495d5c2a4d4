"""Each check of a page finds the fault that is planted for it, and nothing on a page without."""

import time
from urllib.parse import quote

import browser
import pytest

pytestmark = pytest.mark.browser

STYLE = "<style>body { margin: 0; font: 14px sans-serif } svg { background: #fff }</style>"
HEADS = "<th></th><th>a</th><th>b</th>"
FAULTS = {  # a part of a page -> the fault that is found there
    "<p style='color: #999'>pale</p>": "contrast of text: 2.85",
    "<p style='background: #222'>dark</p>": "contrast of text",
    "<div style='opacity: .4'><p>faint</p></div>": "contrast of text",
    "<svg width=90 height=30><text y=20 fill='#aaa'>drawn</text></svg>": "contrast of text",
    "<h1 style='font-size: 30px; color: #949494'>large, and still seen</h1>": "",
    "<p style='font-size: 8px'>small</p>": "small text: 8.0",
    "<svg width=90 viewBox='0 0 360 60'><text y=20 font-size=20>x</text></svg>": "small text: 5.0",
    "<div style='width: 2000px'>wide</div>": "overflow: 2000",
    "<div style='overflow: auto'><p style='width: 2000px'>rolls</p></div>": "",
    "<p style='width: 20px; overflow: hidden; white-space: nowrap'>cut off</p>": "clipped text",
    "<svg width=90 height=30><text x=80 y=20 font-size=20>out</text></svg>": "clipped text",
    "<svg class='chart' width=9 height=9><path d='M0 0h9' stroke='#ccc'/></svg>": "of chart: 1.6",
    "<div class='legend'><i style='background: #eee'></i>name</div>": "contrast of chart",
    f"<table><tr>{HEADS}<tr><td>x<td>0.5<td>0.5</table>": "column twice: a (b)",
    f"<table><tr>{HEADS}<tr><td>x<td>10<td>10</table>": "",
    "<table><tr><th>a<th>b<th>a<tr><td>1<td>2<td>3</table>": "column twice: a (a)",
    "<div class='pair'><img style='display: block; width: 99px'></div>": "narrow pair: 99",
    "<div class='pair' hidden><img width=100 alt='before'></div>": "",
}


@pytest.mark.parametrize("part", FAULTS)
def test_a_planted_fault_is_found(driver, part):
    browser.look(driver)
    driver.get(f"data:text/html,<!doctype html>{quote(STYLE + part)}")
    found = browser.faults(driver)
    assert len(found) == bool(FAULTS[part]) and FAULTS[part] in "".join(found)


def test_messages_of_the_console_and_requests_are_heard(driver):
    address = "http://127.0.0.1:9/x.png"
    driver.get(f"data:text/html,{quote(f'<img src={address}><script>nothing()</script>')}")
    messages, asked = browser.heard(driver)
    assert address in asked and any("nothing is not defined" in m for m in messages)


def test_what_the_page_before_asked_until_it_was_gone_is_not_heard(driver):
    """A page that never stops to ask: between any two commands of a test it asks again."""
    script = "setInterval(() => fetch('http://127.0.0.1:9/state').catch(() => 0), 1)"
    address = f"data:text/html,{quote(f'<script>{script}</script>')}"
    driver.get(address)
    time.sleep(0.2)
    browser.visit(driver, "data:text/html,still")
    messages, asked = browser.heard(driver)
    assert not messages and not any("127.0.0.1" in url for url in asked)


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail), ("", pytest.skip)])
def test_without_a_browser_ci_fails_and_others_skip(monkeypatch, tmp_path, ci, outcome):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome.Exception, match="apt-get install chromium chromium-driver"):
        browser.start(tmp_path)
