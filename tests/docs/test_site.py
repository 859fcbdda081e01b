"""The documentation site: it builds without a warning, needs no network, and shows what its pages say."""
import html
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 60  # of processor time, which other processes take nothing of; it takes six
ARTICLE = re.compile(r"<article.*?</article>", re.DOTALL)
PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
#: What a browser fetches by itself.
FETCHED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?([^\"' >]+)"
                     r"|<link\b(?=[^>]*rel=[\"']?(?:stylesheet|preload|preconnect|icon))[^>]*href=[\"']?([^\"' >]+)")


def _processor_seconds() -> float:
    """Of processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    begin = _processor_seconds()
    built = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], cwd=ROOT,
                           capture_output=True, text=True, timeout=300, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert built.returncode == 0, built.stderr
    assert _processor_seconds() - begin < LIMIT_SECONDS
    return folder


@pytest.fixture(scope="module")
def articles(site: Path) -> dict[str, str]:
    """What stands in the middle of each page, by the page's path."""
    pages = {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    return {name: ARTICLE.search(text)[0] for name, text in pages.items()}  # type: ignore[index]


def test_every_page_is_there(articles: dict[str, str]) -> None:
    docs = ROOT / "docs"
    assert set(articles) == {str(page.relative_to(docs).with_suffix(".html")) for page in docs.rglob("*.md")}


def test_every_table_of_cases_is_drawn(articles: dict[str, str]) -> None:
    counts: dict[str, int] = {}
    for path in (ROOT / "benchmarks").glob("*/tables/*.json"):
        rows, page = json.loads(path.read_text())["rows"], f"cases/{path.parts[-3]}.html"
        assert f'id="{path.stem.replace("_", "-")}"' in articles[page]
        assert html.escape(rows[-1][0].strip("`"), quote=False) in articles[page], path
        counts[page] = counts.get(page, 0) + 1 + len(rows)
    assert counts == {page: text.count("<tr>") for page, text in articles.items() if page.startswith("cases/")}


def test_no_page_fetches_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        for addresses in FETCHED.findall(page.read_text()):
            assert not re.match(r"(https?:)?//", "".join(addresses)), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?https?:", sheet.read_text()), sheet


def test_lists_and_tables_are_shown_as_such(articles: dict[str, str]) -> None:
    """Markdown that GitHub shows as a list is a paragraph here where no empty line stands before it."""
    for name, text in articles.items():
        for paragraph in PARAGRAPH.findall(text):
            begins = re.search(r"(?:^|\n) *(?:[-*] |\d+\. |\||>>>|```|#+ ).*", html.unescape(paragraph))
            assert begins is None, f"{name}: {begins and begins[0].strip()}"
        assert "<blockquote" not in text, name


@pytest.mark.parametrize("name, told", [
    ("profile", ["profile", "fits", "peak_allocated_bytes", "adds up to peak_allocated_bytes", "MissingExtraError"]),
    ("graphs", ["symbolic_trace", "set_region", "GraphInterpreter", "saved_tensors"]),
    ("registration", ["register_flop_impl", "each tensor a <code>TensorSpec</code>", "register_time_impl"]),
    ("parallel", ["world", "profile_ranks", "join_timeline"])])
def test_the_reference_tells_what_docstrings_and_comments_tell(articles: dict[str, str], name: str,
                                                               told: list[str]) -> None:
    text = articles[f"reference/{name}.html"]
    assert [part for part in told if part not in text] == []


@pytest.mark.parametrize("package", ["analyzer", *(f"analyzer.{name}" for name in (
    "fx", "hardware", "meta", "parallel", "recipe", "tools.generation", "tools.runtime", "tools.serving",
    "tools.solver", "tools.sweep"))])
def test_the_reference_has_every_exported_name(articles: dict[str, str], package: str) -> None:
    text = "".join(article for name, article in articles.items() if name.startswith("reference/"))
    headed = set(re.findall(r'id="analyzer\.(?:\w+\.)*(\w+)"', text))
    assert set(importlib.import_module(package).__all__) - headed - {"__version__"} == set()
