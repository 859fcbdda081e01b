"""The picture with which the README and the documentation open: the first screen of a page, as a browser shows it.

    python -m benchmarks.page_picture    # writes docs/img/page.png; needs chromium (Debian: apt-get install chromium)

The model is the Llama of 1.2 billion parameters that ships with the package, a training step with AdamW in bfloat16 on
an H100: the page that ``analyzer profile llama_1b --dtype bf16 --optimizer adamw --device h100 --html FILE`` writes.
"""
from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from analyzer.cli import main as run_command

from .page import ROOT

PICTURE = ROOT / "docs" / "img" / "page.png"
COMMAND = ("profile", "llama_1b", "--dtype", "bf16", "--optimizer", "adamw", "--device", "h100", "--show", "brief")


def take_picture(page: Path, picture: Path) -> None:
    """The first screen of a page, 1280 x 860, to a PNG."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1280, "height": 860})
        shown.goto(page.as_uri())
        shown.wait_for_selector(".memory .main-svg")
        shown.screenshot(path=str(picture))
        browser.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        run_command([*COMMAND, "--html", str(page)])
        PICTURE.parent.mkdir(exist_ok=True)
        take_picture(page, PICTURE)


if __name__ == "__main__":
    main()
