"""Tensors that a collection of garbage frees in the middle of something else, or in another thread."""
import threading

import pytest
import torch

from analyzer.meta.address_space import AddressSpace, MetaStorage, bytes_on_meta

CUDA = torch.device("cuda", 0)


def run_elsewhere(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


class Books:
    """What a listener is told; it lets go of what it holds while it is told of a birth."""

    def __init__(self, run) -> None:
        self.told, self.held, self.run = [], [], run

    def born(self, storage: MetaStorage) -> None:
        self.told.append("birth begins")
        self.run(self.held.clear)
        self.told.append("birth ends")

    def died(self, number: int) -> None:
        self.told.append("death")


@pytest.mark.parametrize("run", [lambda call: call(), run_elsewhere], ids=["here", "in another thread"])
def test_a_tensor_that_dies_while_another_is_born_is_given_back_after_that(run):
    space = AddressSpace()
    space.give_to(threading.get_ident())
    space.listener = books = Books(run)
    books.held.append(space.attach(bytes_on_meta(512), CUDA))
    last = space.attach(bytes_on_meta(1024), CUDA)
    assert books.told == ["birth begins", "birth ends"] * 2 + ["death"]
    assert space.memory(CUDA).allocated_bytes == 1024
    del last
    assert books.told[-1] == "death" and space.memory(CUDA).allocated_bytes == 0


def test_a_tensor_that_dies_in_another_thread_is_given_back_by_the_one_whose_mode_is_in_force():
    space = AddressSpace()
    held = [space.attach(bytes_on_meta(512), CUDA)]
    space.give_to(threading.get_ident())
    run_elsewhere(held.clear)
    assert not held and space.allocator().allocated_bytes == 512
    assert space.memory(CUDA).allocated_bytes == 0
    held.append(space.attach(bytes_on_meta(512), CUDA))
    space.give_to(None)
    run_elsewhere(held.clear)
    assert space.allocator().allocated_bytes == 0
