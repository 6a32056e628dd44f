"""Programs for tests that pip can't install, Chromium and PostgreSQL: ``python tests/programs.py`` installs them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
POSTGRES = ("initdb", "pg_ctl", "postgres", "psql")
INSTALL = "`python tests/programs.py` installs it where apt-get is, and says what to install elsewhere"


def chromium() -> str | None:
    """The browser: the system's, or Playwright's own."""
    found = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if found is not None:
        return found
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if os.path.exists(own) else None


def postgres() -> Path | None:
    """The folder of PostgreSQL's programs; Debian has the server's in a place of its own."""
    folders = [Path(each) for each in os.environ.get("PATH", "").split(os.pathsep)]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((each for each in folders if all((each / name).exists() for name in POSTGRES)), None)


def missing(name: str) -> NoReturn:
    """Skips the test that needs a program; in CI nothing is skipped."""
    message = f"no {name} here: {INSTALL}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def install() -> int:
    """What is missing, by Debian's packages; the browser by Playwright where there are none."""
    wanted = [name for name, there in (("chromium", chromium()), ("postgresql", postgres())) if there is None]
    if not wanted:
        return 0
    print(f"installing {' and '.join(wanted)}", flush=True)
    apt = shutil.which("apt-get")
    if apt is not None:
        before = [] if os.geteuid() == 0 else ["sudo", "-n"]
        for words in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *wanted]):
            subprocess.run([*before, apt, *words], stdout=subprocess.DEVNULL, check=False)
    if chromium() is None:
        subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=False)
    left = [name for name, there in (("Chromium", chromium()), ("PostgreSQL", postgres())) if there is None]
    if left:
        print(f"not installed: {' and '.join(left)}; their tests are skipped. Install them as your system does")
    return 1 if left and os.environ.get("CI") else 0


if __name__ == "__main__":
    sys.exit(install())
