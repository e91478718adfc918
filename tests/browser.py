"""Debian's Chromium, driven by selenium: nothing is downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

BROWSER, DRIVER = "chromium", "chromedriver"


def missing() -> str | None:
    """Why there is no browser, or None if there is one."""
    programs = [name for name in (BROWSER, DRIVER) if shutil.which(name) is None]
    if programs:
        return f"no {' and no '.join(programs)}: apt-get install chromium chromium-driver"
    return None if find_spec("selenium") else 'no selenium: pip install "quickvit[dev]"'


@contextmanager
def open_browser() -> Iterator:
    """A browser without a window and without animations, whose console is kept."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which(BROWSER))
    # Without a sandbox, since CI runs as root; the pages are our own.
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-dev-shm-usage",
        "hide-scrollbars",
        "window-size=1100,1600",
    ):
        options.add_argument(f"--{argument}")
    options.add_argument("--force-prefers-reduced-motion")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, Service(shutil.which(DRIVER)))
    try:
        yield browser
    finally:
        browser.quit()
