"""Makes memory snapshots as PyTorch would: requests are carried out by a simulated allocator, and written down."""
import gzip
import pickle
from pathlib import Path
from typing import Any

from analyzer.memory.allocator import AllocatorOptions, Block, CachingAllocator

Frame = tuple[str, str, int]  # function, file, line

MODULE = "/env/lib/python3.11/site-packages/torch/nn/modules/module.py"
LINEAR = "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py"
OPTIMIZER = "/env/lib/python3.11/site-packages/torch/optim/optimizer.py"
FORWARD = [("forward", LINEAR, 125), ("_call_impl", MODULE, 1762), ("forward", "/home/me/net.py", 41),
           ("_call_impl", MODULE, 1762), ("<module>", "/home/me/train.py", 9)]
BACKWARD = [("at::detail::empty_cuda", "??", 0), ("torch::autograd::generated::MmBackward0::apply", "??", 0),
            ("torch::autograd::Engine::evaluate_function", "??", 0)]
STEP = [("_init_group", "/env/lib/python3.11/site-packages/torch/optim/adamw.py", 150),
        ("profile_hook_step", OPTIMIZER, 493), ("<module>", "/home/me/train.py", 12)]
DATA = [("<module>", "/home/me/train.py", 7)]
EMPTY = [("empty_cache", "/env/lib/python3.11/site-packages/torch/cuda/memory.py", 222),
         ("<module>", "/home/me/train.py", 14)]


class Recording:
    """A run whose history is recorded from `start` on; blocks are named by whoever asks for them."""

    def __init__(self, options: AllocatorOptions | None = None, capacity_bytes: int | None = None) -> None:
        self.options = options or AllocatorOptions()
        self.allocator = CachingAllocator(capacity_bytes, self.options)
        self.allocator.observer = self._observe
        self.events: list[dict[str, Any]] = []
        self.blocks: dict[str, Block] = {}
        self.frames: dict[int, list[dict[str, Any]]] = {}
        self._is_on = False
        self._stack: list[Frame] = []
        self._stream = 0
        self._streams: dict[int, int] = {}  # of what was taken from the device, by address

    def start(self) -> None:
        self._is_on = True

    def alloc(self, name: str, nbytes: int, stack: list[Frame], stream: int = 0) -> None:
        self._stack, self._stream = stack, stream
        block = self.blocks[name] = self.allocator.allocate(nbytes, stream)
        self._add("alloc", block.address, nbytes, stream)
        if self._is_on:
            self.frames[block.address] = self._write(stack)

    def free(self, name: str, stack: list[Frame]) -> None:
        self._stack = stack
        block = self.blocks.pop(name)
        for action in ("free_requested", "free_completed"):
            self._add(action, block.address, block.requested_bytes, block.stream)
        self.allocator.free(block)

    def empty_cache(self) -> None:
        self._stack = EMPTY
        self.allocator.empty_cache()

    def fail(self, nbytes: int, free_bytes: int, stack: list[Frame]) -> None:
        self._stack = stack
        self._add("oom", free_bytes, nbytes, 0)

    def _observe(self, action: str, address: int, nbytes: int) -> None:
        if action in ("segment_alloc", "segment_map"):
            self._streams[address] = self._stream
        if action.startswith("segment"):  # what is given back begins where something was taken
            self._add(action, address, nbytes, self._streams[max(at for at in self._streams if at <= address)])

    def _add(self, action: str, address: int, nbytes: int, stream: int) -> None:
        if self._is_on:
            self.events.append({
                "action": action, "device_free" if action == "oom" else "addr": address, "size": nbytes,
                "stream": stream, "time_us": 10**15 + 10 * len(self.events), "frames": self._write(self._stack)})

    @staticmethod
    def _write(stack: list[Frame]) -> list[dict[str, Any]]:
        return [{"name": name, "filename": file, "line": line} for name, file, line in stack]

    def snapshot(self) -> dict[str, Any]:
        segments = self.allocator.snapshot()
        for segment in segments:
            for block in segment["blocks"]:
                block["frames"] = self.frames.get(block["address"], []) if block["state"] != "inactive" else []
        return {"segments": segments, "device_traces": [self.events], "allocator_settings": self.options.snapshot(),
                "external_annotations": []}

    def write(self, path: Path) -> Path:
        with (gzip.open if path.suffix == ".gz" else open)(path, "wb") as file:
            pickle.dump(self.snapshot(), file)
        return path


def train(recording: Recording, steps: int, layers: int = 3, size: int = 3 << 20) -> None:
    """Steps of a small training loop: activations, gradients, states of an optimizer in the first step."""
    for step in range(steps):
        recording.alloc("input", 1 << 20, DATA)
        for layer in range(layers):
            recording.alloc(f"activation {layer}", size, FORWARD)
        for layer in reversed(range(layers)):
            recording.alloc(f"gradient {layer}", size, BACKWARD)
            recording.free(f"activation {layer}", BACKWARD)
        if not step:
            for layer in range(layers):
                recording.alloc(f"state {layer}", size, STEP)
        for layer in range(layers):
            recording.free(f"gradient {layer}", DATA)
        recording.free("input", DATA)
