"""`analyzer view` writes the page of what was saved, with the command that asks again, and opens it."""
from html import escape

import pytest

from analyzer.api.result import Profile
from analyzer.cli import main
from analyzer.parallel.rank_row import describe_rank
from analyzer.parallel.rank_table import RankTable
from analyzer.report.comparison.compare import compare


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two saved profiles of one model, on two devices."""
    path = tmp_path_factory.mktemp("view")
    for device in ("t4", "l4"):
        assert main(["profile", "resnet18", "--input", "2x3x64x64", "--mode", "infer", "--device", device, "--show",
                     "brief", "--json", f"{path}/{device}.json"]) == 0
    return path


@pytest.fixture
def opened(monkeypatch):
    """The addresses that were opened in a browser."""
    found = []
    monkeypatch.setattr("webbrowser.open", found.append)
    return found


def test_the_page_of_a_profile_is_opened_and_says_which_command_asks_again(folder, opened, capsys, tmp_path):
    page = tmp_path / "one.html"
    assert main(["view", str(folder / "t4.json"), "--html", str(page)]) == 0
    saved = Profile.from_json(folder / "t4.json")
    assert capsys.readouterr().out == f"{page}\n" and opened == [page.as_uri()]
    assert page.read_text() == saved.to_html()
    assert f"<code>{escape(str(saved.made_by))}</code>" in page.read_text()
    assert "analyzer profile resnet18 --input float32:2x3x64x64 --mode infer" in page.read_text()


def test_a_page_without_a_name_is_written_where_no_file_is(folder, opened, capsys):
    assert main(["view", str(folder / "t4.json"), "--no-browser"]) == 0
    first = capsys.readouterr().out
    assert main(["view", str(folder / "t4.json"), "--no-browser"]) == 0
    assert capsys.readouterr().out != first and opened == [] and not list(folder.glob("*.html"))


def test_two_profiles_are_the_page_of_what_changed(folder, opened, capsys, tmp_path):
    page = tmp_path / "changed.html"
    assert main(["view", *(str(folder / f"{name}.json") for name in ("t4", "l4")), "--html", str(page)]) == 0
    assert page.read_text() == compare(*(Profile.from_json(folder / f"{name}.json") for name in ("t4", "l4"))).to_html()


def test_a_table_of_ranks_has_its_page(folder, opened, capsys, tmp_path):
    profiles = {i: Profile.from_json(folder / f"{name}.json") for i, name in ((0, "t4"), (3, "l4"))}
    rows = tuple([describe_rank(profile, rank, (rank,), f"kind {rank}") for rank, profile in profiles.items()])
    table = RankTable(4, rows, profiles=profiles)
    table.to_json(tmp_path / "ranks.json")
    assert main(["view", str(tmp_path / "ranks.json"), "--html", str(tmp_path / "ranks.html")]) == 0
    assert (tmp_path / "ranks.html").read_text() == table.to_html()


@pytest.mark.parametrize(("words", "said"), [
    (["nope.json"], "nope.json"), (["table"], "table"), (["t4.json", "nope.json"], "nope.json"),
    (["t4.json", "l4.json", "t4.json"], "view shows one file, or what changed between two"),
    (["t4.json", "--html", "."], "'.': is a folder")])
def test_files_that_are_none_are_refused(folder, monkeypatch, opened, capsys, words, said):
    monkeypatch.chdir(folder)
    assert main(["view", *words]) == 2
    assert said in capsys.readouterr().err and opened == []
