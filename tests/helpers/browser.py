"""A headless Chromium that records its console and its requests."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.patience import until

if TYPE_CHECKING:
    from selenium import webdriver

CHROMIUM, DRIVER = "chromium", "chromedriver"
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, and open their own files only
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)
LAID_OUT_S = 60  # until a page is complete
_IS_THERE = "return location.href === arguments[0] && document.readyState === 'complete'"
_LAID_OUT = """
const done = arguments[arguments.length - 1];
document.fonts.ready.then(() => requestAnimationFrame(() => requestAnimationFrame(() => done())));
"""


class Browser:
    """One open page."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, path: Path) -> None:
        """Opens a file and waits until all of it is laid out; older messages are forgotten."""
        # chromedriver may take the old page of the same file, which is complete, for the new one.
        self.driver.get("about:blank")
        self.console(), self.requests()
        address = path.absolute().as_uri()
        self.driver.get(address)
        until(lambda: self.run(_IS_THERE, address), address, patience_s=LAID_OUT_S)
        self.driver.execute_async_script(_LAID_OUT)  # type: ignore[no-untyped-call]

    def resize(self, width: int, *, dark: bool = False) -> None:
        """Sets the width of the window in pixels, and what the reader prefers."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def run(self, script: str, *args: Any) -> Any:
        """Returns what a script of the test returns in the page."""
        return self.driver.execute_script(script, *args)  # type: ignore[no-untyped-call]

    def all(self, selector: str) -> list[Any]:
        """Returns the elements that a selector names."""
        return list(self.driver.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        """Returns the first element that a selector names."""
        return self.driver.find_element("css selector", selector)

    def console(self) -> list[str]:
        """Returns what the console has said since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Returns the addresses that were asked for since this was last asked."""
        entries = [json.loads(one["message"]) for one in self.driver.get_log("performance")]
        messages = [entry["message"] for entry in entries]
        sent = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Starts a browser, and ends it however the test ends."""
    from selenium import webdriver  # takes a second, and most runs of the tests open no page

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which(CHROMIUM) or CHROMIUM
    for word in _OPTIONS:
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(shutil.which(DRIVER))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        driver.set_page_load_timeout(60)
        driver.set_script_timeout(60)
        yield Browser(driver)
    finally:
        driver.quit()
