"""What a user downloads: a source distribution is built of the tracked files, without a network, and read."""
import email
import re
import subprocess
import sys
import tarfile
from email.message import Message
from pathlib import Path

import pytest

import analyzer

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools import build_meta; print('built', build_meta.build_sdist('dist'))"


def tracked() -> list[str]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a source distribution by their names, its own folder left out."""
    folder = tmp_path_factory.mktemp("tree")
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    for cache in ("tests/__pycache__", "docs/__pycache__"):
        (folder / cache).mkdir(exist_ok=True)
        (folder / cache / "left.cpython-311.pyc").write_bytes(b"")
    (folder / "dist").mkdir()
    built = subprocess.run([sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    name = built.stdout.split()[-1]
    with tarfile.open(folder / "dist" / name) as tar:
        return {member.name.partition("/")[2]: tar.extractfile(member).read()  # type: ignore[union-attr]
                for member in tar.getmembers() if member.isfile()}


@pytest.fixture(scope="module")
def metadata(archive: dict[str, bytes]) -> Message:
    return email.message_from_bytes(archive["PKG-INFO"])


def test_it_holds_what_one_reads_runs_and_tests_with(archive: dict[str, bytes]) -> None:
    missing = sorted(set(tracked()) - set(archive) - {".gitignore", ".ci/run"})
    assert missing == []
    assert {"docs/usage.md", "docs/solvers.md", "examples/train_loop.py", "tests/conftest.py", "analyzer/py.typed",
            "tests/report/golden/node_table_vit.txt", "Makefile", "constraints.txt"} <= set(archive)


def test_it_holds_nothing_else(archive: dict[str, bytes]) -> None:
    made = {"PKG-INFO", "setup.cfg"}
    more = {name for name in archive if not name.startswith("symbolic_analyzer.egg-info/")} - set(tracked()) - made
    assert more == set(), "left behind by an interpreter or an editor"


def test_the_metadata_names_the_package_and_no_address_that_is_not_there(metadata: Message) -> None:
    assert metadata["Version"] == analyzer.__version__
    assert metadata["Name"] == "symbolic-analyzer" and metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("Project-URL") is metadata["Home-page"] is None, "the repository has no public home"


def test_the_package_s_page_has_no_link_to_a_file(metadata: Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert isinstance(text, str) and text.lstrip().startswith("# analyzer")
    assert len(re.findall(r"\]\(docs/", (ROOT / "README.md").read_text())) > 10
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")] == []
    assert "docs/img" not in text and "does it fit" in text, "a picture is left out, the text of a link stays"


def test_the_readme_begins_with_what_it_answers_and_how_to_get_it() -> None:
    first, question, block, *_ = (ROOT / "README.md").read_text().split("\n\n")
    assert first == "# analyzer" and "?" in question
    assert [line.split("#")[0].split() for line in block.splitlines()[1:4]] == [
        ["make", "profile"], ["make", "test"], ["pip", "install", "-e", "."]]
