"""The table by which a device is chosen: order, what shares a row, prices, and what must be left."""
import pytest
import torch

import analyzer
from analyzer.cli import main
from analyzer.errors import InputError, UnknownDeviceError
from analyzer.hardware import find_device
from analyzer.hardware.price import read_prices
from analyzer.report.fit_table import print_fits, sort_rows
from analyzer.results.verdict import FitRow, FitTable, Headroom

GIB = 2**30


def row(device, capacity, needed, seconds=None, tokens=None, price=None, fits=None):
    return FitRow(device=device, capacity_bytes=capacity * GIB, needed_bytes=needed * GIB,
                  free_bytes=(capacity - needed) * GIB, fits=capacity >= needed if fits is None else fits,
                  step_seconds=seconds, step_seconds_range=seconds and (seconds / 2, 2 * seconds),
                  tokens_per_second=tokens, dollars_per_hour=price)


ROWS = (row("small", 8, 20, 0.4, 1000), row("slow", 24, 20, 0.2, 2000, 0.9), row("twin", 24, 20, 0.201, 1990, 0.9),
        row("fast", 80, 21, 0.1, 4000, 3.6), row("tight", 22, 21, 0.3, 1333))
TABLE = FitTable("Net", ROWS)


def names(sort, table=TABLE):
    return [one.device for one in sort_rows(table, sort)]


def test_devices_that_fit_come_first():
    assert names("memory") == ["tight", "slow", "twin", "fast", "small"]
    assert names("time") == ["fast", "slow", "twin", "tight", "small"]
    assert names("price")[:3] == ["slow", "twin", "fast"]  # of the others no price is known
    assert names("memory", FitTable("Net", ROWS, Headroom(share=0.5)))[0] == "fast"


def test_an_order_that_cannot_be_is_refused():
    with pytest.raises(InputError, match="must be one of 'memory', 'time', 'price'"):
        sort_rows(TABLE, "size")
    with pytest.raises(InputError, match="no price is known"):
        sort_rows(FitTable("Net", ROWS[:1]), "price")


def test_dollars_are_of_a_million_tokens():
    # 2.5 dollars an hour, a million tokens in 500 s: 2.5 * 500 / 3600
    assert row("a", 24, 20, 0.2, 2000, 2.5).dollars_per_million == pytest.approx(2.5 * 500 / 3600)
    assert row("a", 24, 20, 0.2, 2000).dollars_per_million is None
    several = FitRow(device="a", count=4, samples_per_second=100.0, dollars_per_hour=3.6)
    assert several.dollars_per_million == pytest.approx(4 * 3.6 * 1e4 / 3600)


def test_devices_that_are_alike_share_a_row():
    text = print_fits(TABLE)
    assert "slow, twin" in text and len(text.splitlines()) == 2 + 4
    assert len(print_fits(TABLE, "csv").splitlines()) == 1 + 5
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["tight", "slow,", "fast", "small"]
    assert "200.00 ms (100.00 to 400.00)" in text and "$/M tokens" in text


def test_what_barely_fits_says_so():
    line = next(line for line in print_fits(TABLE).splitlines() if line.startswith("tight"))
    assert "barely" in line and "5%" in line
    assert "barely: less than 5 % or 2.00 GiB is left for a desktop" in str(TABLE)
    assert ROWS[4].is_tight and not ROWS[1].is_tight and not ROWS[0].is_tight
    assert "barely" not in str(FitTable("Net", ROWS[:1]))


def test_a_headroom_is_a_rule():
    table = FitTable("Net", ROWS, Headroom.parse("10%"))
    assert table.fitting == ("slow", "twin", "fast") and "with 10 % left" in table.said
    assert "too little left" in str(table)
    assert FitTable("Net", ROWS, Headroom.parse("50GiB")).fitting == ("fast",)
    for wrong in ("ten", "120%", "-3%"):
        with pytest.raises(InputError, match=f"--headroom {wrong}: give a share"):
            Headroom.parse(wrong)


def test_prices_are_a_number_a_list_a_file_or_a_mapping(tmp_path):
    assert read_prices(None).find("t4") is None and read_prices(2).find("t4") == 2.0
    assert read_prices({"h100": 2.5}).find("h100_sxm") == 2.5 and read_prices("h100=2.5, 0.4").find("t4") == 0.4
    lines, record = tmp_path / "prices.txt", tmp_path / "prices.json"
    lines.write_text("h100 = 2.5  # on demand\nl40s=0.9\n")
    record.write_text('{"h100": 2.5, "l40s": 0.9}')
    for path in (lines, str(record)):
        assert (read_prices(path).find("l40s"), read_prices(path).find("t4")) == (0.9, None)


@pytest.mark.parametrize(("given", "said"), [
    ("much", "price=much: much is no price; give dollars"), ("h100=-1", "h100=-1 is no price"),
    ("h100=1,h100=2", "h100 has two prices"), ("nan", "nan is no price"), ({"h100": None}, "h100=None is no price")])
def test_a_wrong_price_is_refused(given, said):
    with pytest.raises(InputError, match=said):
        read_prices(given)
    with pytest.raises(UnknownDeviceError, match="'h1000'"):
        read_prices("h1000=1")


def test_fits_tells_times_and_prices():
    table = analyzer.fits(torch.nn.Linear(1024, 1024), torch.empty(4096, 1024, device="meta"), mode="infer",
                          devices=["l4", "h100"], prices={"l4": 0.7}, headroom="1%")
    alone = analyzer.profile(torch.nn.Linear(1024, 1024), torch.empty(4096, 1024, device="meta"), mode="infer",
                             device="l4")
    assert table["l4"].step_seconds == alone.step_seconds and table["l4"].samples_per_second == (
        alone.samples_per_second)
    assert table["l4"].step_seconds_range == alone.step_seconds_range
    assert table["l4"].dollars_per_million == pytest.approx(0.7 * 1e6 / alone.samples_per_second / 3600)
    assert table["h100"].dollars_per_million is None and table.headroom == Headroom(share=0.01)


def run(capsys, *words):
    code = main(list(words))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_command(capsys):
    words = ["fit", "resnet18", "--input", "64x3x224x224", "--device", "t4", "--device", "h100_sxm"]
    code, out, _ = run(capsys, *words, "--price", "h100=2.5,t4=0.35", "--sort", "time")
    rows = [line.split()[0] for line in out.splitlines() if line.startswith(("t4", "h100"))]
    assert code == 0 and rows == ["h100_sxm", "t4"] and "$/M samples" in " ".join(out.split())
    assert run(capsys, *words, "--headroom", "99.9%")[0] == 3
    for flags, said in ((["--sort", "price"], "give --price"), (["--price", "x"], "--price x"),
                        (["--headroom", "x"], "--headroom x")):
        code, _, err = run(capsys, *words, *flags)
        assert code == 2 and said in err
    assert "is for the table of devices" in run(capsys, *words[:-2], "--price", "2")[2]


def test_a_headroom_of_a_profile_ends_with_3(capsys):
    words = ["profile", "resnet18", "--input", "2x3x64x64", "--device", "t4"]
    assert run(capsys, *words, "--headroom", "10%")[0] == 0
    code, out, _ = run(capsys, *words, "--headroom", "99%")
    assert code == 3 and "less than the headroom of 99 % is left" in out


def test_a_headroom_leaves_less_for_the_largest_batch(capsys):
    words = ["fit", "resnet18", "--input", "{batch}x3x224x224", "--mode", "infer", "--device", "t4", "--multiple-of",
             "128", "--at-most", "1280"]
    whole, less = (run(capsys, *words, *flags)[1] for flags in ((), ("--headroom", "50%")))
    taken = [float(out.split("\nthe allocator may take ")[1].split()[0]) for out in (whole, less)]
    assert taken[0] - taken[1] == pytest.approx(find_device("t4").memory_bytes / 2**31, abs=0.01)
    assert "that fits is 1,280 or more" in whole and "that fits is 1,024" in less


def test_a_price_is_told_alike_in_each_command(capsys, tmp_path):
    saved = tmp_path / "saved.json"
    analyzer.profile(torch.nn.Linear(64, 64), torch.empty(32, 64), mode="infer", device="l4").to_json(saved)
    words = ["show", str(saved), "--samples", "1e9"]
    told = [run(capsys, *words, "--price", price)[1] for price in ("0.7", "h100=2.5,l4=0.7")]
    assert told[0] == told[1] and "device-hours at 0.7 each" in told[0]
    assert "dollars" not in run(capsys, *words, "--price", "h100=2.5")[1]
    code, _, err = run(capsys, *words, "--price", "x")
    assert code == 2 and "--price x: x is no price" in err
    code, _, err = run(capsys, "search", "gpt2", "--cluster", "8xh100", "--price", "h1000=2")
    assert code == 2 and "'h1000'" in err


def test_options_of_one_flag_are_of_their_commands(capsys):
    for command, said in (("profile", "do not look for changes with"), ("search", "do not look for changes that")):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert said in " ".join(capsys.readouterr().out.split()), command
