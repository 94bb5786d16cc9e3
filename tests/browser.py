"""Which browser tests look at pages with, and how they say so when there is none.

A Chromium of the system: nothing is downloaded. CAIRN_TEST_CHROMIUM names another one.
"""

import os
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    given = os.environ.get("CAIRN_TEST_CHROMIUM")
    return shutil.which(given) if given else next(filter(None, map(shutil.which, NAMES)), None)


def chromium() -> str:
    """Its path; skips the test where it is absent."""
    found = find_chromium()
    if found is None:
        pytest.skip(
            "needs a Chromium on the PATH, or CAIRN_TEST_CHROMIUM (apt-get install chromium)"
        )
    return found
