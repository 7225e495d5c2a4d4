"""Debian's Chromium as a test drives it: no download, no request of its own."""

import json
import os
import shutil
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

FAULTS = Path(__file__).parents[1] / "browser" / "checks.js"
OPTIONS = (
    "no-sandbox headless=new disable-gpu disable-background-networking disable-component-update"
    " disable-sync no-first-run disable-dev-shm-usage"
)
WIDTHS, THEMES = (400, 800, 1280), ("light", "dark")


def start(folder):
    """A driver, whose browser has its files in `folder`. Without a browser: failed in CI, else
    skipped."""
    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in found:
        why = "there is no chromium or no chromedriver: apt-get install chromium chromium-driver"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for option in (*OPTIONS.split(), f"user-data-dir={folder}"):
        options.add_argument(f"--{option}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options, Service(found[1]))


def look(driver, width=1280, theme="light"):
    """Show the page in a window of this width, in this colour scheme."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)


def visit(driver, address):
    """Show a page; what the one before it asks until it is gone does not count as this one's."""
    driver.get("about:blank")
    heard(driver)
    driver.get(address)


def faults(driver):
    return driver.execute_script(FAULTS.read_text())


def heard(driver):
    """(messages of the console, addresses that were asked) since the last call."""
    logged = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [m["params"] for m in logged if m["method"] == "Network.requestWillBeSent"]
    asked = {params["request"]["url"].partition(",")[0] for params in sent}
    return [entry["message"] for entry in driver.get_log("browser")], asked
