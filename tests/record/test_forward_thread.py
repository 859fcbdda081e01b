"""Threads of a forward: what they do with its tensors is refused with the line that starts them, never lost."""
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest
import torch
from torch import nn

from analyzer import profile, symbolic_trace
from analyzer.errors import InputError

X = torch.ones(3, 6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.pool, self.threads = ThreadPoolExecutor(1), ThreadPool(1)
        self.pool.submit(int).result()  # its thread is there before forward runs


class Thread(Model):
    def forward(self, x):
        out = []
        thread = threading.Thread(target=lambda: out.append(self.fc(x)))
        thread.start()
        thread.join()
        return out[0] * 2


class Unused(Model):
    """Nothing else goes wrong where the thread fails."""

    def forward(self, x):
        thread = threading.Thread(target=lambda: self.fc(x))
        thread.start()
        thread.join()
        return x * self.fc.bias


class Pool(Model):
    def forward(self, x):
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(self.fc, (x, x)))


class OwnPool(Model):
    def forward(self, x):
        return self.pool.submit(lambda: self.fc(x)).result()


class OwnThreads(Model):
    def forward(self, x):
        return self.threads.map(self.fc, [x])[0]


class Parallel(Model):  # which asks for streams of the accelerator; on a machine without one PyTorch says so
    def forward(self, x):
        return sum(nn.parallel.parallel_apply([self.fc, self.fc], [x, x]))


def trace(model):
    return symbolic_trace(model, meta_args={"x": X})


def train(model, device=None):
    return profile(model, (X,), mode="train", device=device)


@pytest.mark.parametrize(("kind", "run"), [
    *[(kind, run) for kind in (Thread, Unused, Pool, OwnPool, OwnThreads) for run in (trace, train)],
    (Parallel, trace)])
def test_work_of_a_thread_is_refused(kind, run, capsys):
    model = kind()
    start = threading.Thread.start, ThreadPoolExecutor.submit, ThreadPool.imap
    with pytest.raises(InputError, match=r"Cannot access accelerator|"
                                         r"forward (runs torch.nn.functional.linear in|gives tensors to) a thread that "
                                         r"it starts at .*test_forward_thread.py:\d+. Threads are not followed"):
        run(model)
    assert (threading.Thread.start, ThreadPoolExecutor.submit, ThreadPool.imap) == start
    assert not capsys.readouterr().err  # the thread's own failure is told once
    if kind is not Parallel:  # which needs an accelerator
        assert model(X).shape == (3, 6) or kind is Unused  # and the pools work as before
    model.threads.terminate()


def test_a_pool_that_is_given_its_function_by_name_does_other_work():
    class Names(Model):
        def forward(self, x):
            return self.fc(x) * sum(self.threads.imap(func=len, iterable=["ab", "c"]))

    model = Names()
    assert torch.equal(trace(model)(X), model(X))
    model.threads.terminate()


def test_replicas_on_an_accelerator_take_turns():
    class InTurn(Model):
        def forward(self, x):
            return sum([self.fc(x), self.fc(x)])

    found, wanted = [train(kind(), "h100") for kind in (Parallel, InTurn)]
    assert found.fwd_flops == wanted.fwd_flops > 0


def test_threads_that_do_something_else_are_let_be():
    class Elsewhere(Model):
        def forward(self, x):
            count = self.pool.submit(lambda: x.shape[0] + int(torch.ones(3).sum())).result()
            failed = self.pool.submit(lambda: 1 / 0).exception()
            assert isinstance(failed, ZeroDivisionError)
            return self.fc(x) * count

    model = Elsewhere()
    assert profile(model, (X,), mode="infer").fwd_flops == 2 * 3 * 6 * 6 + 3 * 6  # the product and the scale
    assert torch.equal(symbolic_trace(model, meta_args={"x": X})(X), model.fc(X) * 6)
