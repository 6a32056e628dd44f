"""Finds a Chromium, or installs one: ``python tests/browser/chromium.py``."""

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """The program's path."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is not None:
        return found
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if os.path.exists(own) else None


def install() -> None:
    """By Debian's packages where this process may use them, else by Playwright."""
    if shutil.which("apt-get") and os.geteuid() == 0:
        for words in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", "chromium"]):
            if subprocess.run(["apt-get", *words], stdout=subprocess.DEVNULL, check=False).returncode:
                break
        else:
            return
    subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=True)


if __name__ == "__main__":
    if chromium() is None:
        install()
    print(chromium())
