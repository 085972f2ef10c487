"""Chromium without a window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def browser() -> Iterator[Any]:
    """Give a browser that logs its console; skip the test where there is none."""
    from selenium import webdriver  # few tests need it

    names = [("chromium", "chromium-browser", "google-chrome"), ("chromedriver",)]
    binary, driver = (next(filter(None, map(shutil.which, choices)), None) for choices in names)
    if binary is None or driver is None:
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    quiet = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *quiet):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        chromium.execute_cdp_cmd("Network.enable", {})
        yield chromium
    finally:
        chromium.quit()
