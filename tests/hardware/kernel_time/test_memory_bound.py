import pytest

from analyzer.hardware import DeviceSpec, PeakRates
from analyzer.hardware.kernel_time.pointwise import stream_time

CARD = DeviceSpec("card", memory_bandwidth=1e12, flops_per_second=PeakRates(fp32=10e12), compute_capability=(8, 0),
                  multiprocessors=108, clock_hertz=1e9)


def test_more_bytes_take_longer():
    times = [stream_time(n, CARD).seconds for n in (0, 10, 10**4, 10**6, 10**8, 10**10)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(10**10 / 1e12, rel=0.3)


def test_instructions_bound_a_kernel_that_moves_little():
    time = stream_time(10**6, CARD, instructions=108 * 128 * 1e6)  # a million cycles of 108 multiprocessors
    assert time.bound == "arithmetic"
    assert time.seconds == pytest.approx(1e-3, rel=0.02)


def test_a_bandwidth_that_is_unknown_makes_the_time_unknown():
    assert stream_time(10**6, DeviceSpec("card")) is None


def test_gddr_gives_less_of_its_rate():
    gddr = DeviceSpec("card", memory_bandwidth=1e12, compute_capability=(8, 9))
    assert stream_time(10**9, gddr).seconds > stream_time(10**9, CARD).seconds
