"""The models of four published memory snapshots, rebuilt, and what of each snapshot's peak a dry run predicts.

    python -m benchmarks.accuracy.snapshot_models FOLDER         # aligns each: docs/accuracy.md, and what is left
    python -m benchmarks.accuracy.snapshot_models --run NAME     # one step of a model, as a script that is run dry

Both authors wrote a decoder with attention whose scores are a tensor, rotary embeddings, RMSNorm and SwiGLU. What is
here computes the same in the same order, so that it makes the same tensors; a comment names the line of theirs that
makes those of a line of ours. Sizes are those of the snapshots' README.
"""
from __future__ import annotations

import argparse
import math
import re
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from analyzer.units import format_bytes
from benchmarks.page import describe_run, markdown, percent, publish

Tensor = torch.Tensor


@dataclass(frozen=True)
class Run:
    """What a snapshot recorded: the sizes of a decoder, its author's style, and the parts of a step."""

    file: str
    style: str        #: whose code: "k" or "w"
    width: int
    layers: int
    heads: int
    context: int
    autocast: torch.dtype | None = None
    step: str = "forward"  #: forward, first (whole step of a fresh process) or later
    device: str = "h100_sxm"  #: by the workspace of cuBLAS in the file: 32 MiB, or 8,320 KiB before Hopper
    batch: int = 4
    words: int = 10_000


RUNS = {run.file: run for run in (
    Run("memory_ctx128_forward", "k", 2560, 32, 32, 128),
    Run("memory_ctx128_fullstep", "k", 2560, 32, 32, 128, step="first"),
    Run("memory_ctx256_forward_mixed", "k", 2560, 32, 32, 256, torch.bfloat16),
    Run("medium_512_training_memory_snapshot", "w", 1024, 24, 16, 512, torch.float16, "later", "a100_80gb"))}


class Linear(nn.Module):
    """A weight and a product by `torch.einsum`; in style k its weight comes first."""

    def __init__(self, inputs: int, outputs: int, style: str) -> None:
        super().__init__()
        self.style = style
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "k":
            return torch.einsum("io,bsi->bso", self.weight.T, x)  # transformer.py:22
        return torch.einsum("bsi,oi->bso", x, self.weight)  # model.py:39


class Embedding(nn.Module):
    """Rows of a weight by index."""

    def __init__(self, words: int, width: int, style: str) -> None:
        super().__init__()
        self.style = style
        self.weight = nn.Parameter(torch.empty(words, width))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.style == "k":
            return self.weight[tokens]  # transformer.py:39
        return self.weight[tokens, :]  # model.py:54


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, width: int, style: str) -> None:
        super().__init__()
        self.style, self.width = style, width
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float32)  # transformer.py:53
        if self.style == "k":
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # transformer.py:54
            rms = torch.sqrt(norm ** 2 / self.width + 1e-5)  # transformer.py:55
            x = x / rms  # transformer.py:56
            result = torch.einsum("d,bsd->bsd", self.weight, x)  # transformer.py:57
            return result.to(kind)  # transformer.py:59
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)  # model.py:101
        x = x * rms  # model.py:102
        return (self.weight * x).to(kind)  # model.py:104


class Rotary(nn.Module):
    """Rotary embeddings of pairs of features: of neighbours."""

    def __init__(self, context: int, size: int, style: str) -> None:
        super().__init__()
        self.style = style
        self.tables: Tensor
        self.register_buffer("tables", torch.zeros(2, context, size // 2), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        if self.style == "k":
            cos = self.tables[0][positions].unsqueeze(1)  # transformer.py:117
            sin = self.tables[1][positions].unsqueeze(1)  # transformer.py:118
            even, odd = x[..., ::2], x[..., 1::2]
            out = torch.empty_like(x)  # transformer.py:125
            out[..., ::2] = even * cos - odd * sin  # transformer.py:126
            out[..., 1::2] = even * sin + odd * cos  # transformer.py:127
            return out
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.tables[:, :x.size(-2)].unbind(0)
        first = cos * even - sin * odd  # model.py:147
        second = sin * even + cos * odd  # model.py:148
        return torch.concat((first, second), dim=-1)  # model.py:150


class Attention(nn.Module):
    """Causal attention of several heads; scores are a tensor."""

    def __init__(self, width: int, heads: int, rotary: Rotary, style: str) -> None:
        super().__init__()
        self.style, self.heads = style, heads
        self.q, self.k, self.v, self.out = (Linear(width, width, style) for _ in range(4))
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q(x), self.k(x), self.v(x)))
        if self.style == "k":
            positions = torch.arange(length, device=x.device).unsqueeze(0).expand(batch, -1)  # transformer.py:199
            q, k = self.rotary(q, positions), self.rotary(k, positions)
            mask = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).to(torch.bool)
            mask = ~mask  # transformer.py:205
            mask = mask.unsqueeze(0).unsqueeze(0).expand(batch, self.heads, -1, -1)
            scores = torch.einsum("...qd,...kd->...qk", q, k)  # transformer.py:147
            scores = scores / math.sqrt(width // self.heads)  # transformer.py:148
            scores = scores.masked_fill(mask == False, -1e9)  # noqa: E712 # transformer.py:151
            result = torch.einsum("...qk,...kd->...qd", self._weigh(scores), v)  # transformer.py:154
            result = result.transpose(1, 2).reshape(batch, length, width)  # transformer.py:211
        else:
            q, k = self.rotary(q, None), self.rotary(k, None)
            places = torch.arange(length, device=x.device)  # model.py:513
            mask = (places[:, None] >= places[None, :])[None]  # model.py:516
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k)  # model.py:427
            scores = scores / math.sqrt(width // self.heads)  # model.py:427
            scores = torch.where(mask, scores, float("-inf"))  # model.py:430
            result = torch.einsum("bhqk,bhkd->bhqd", self._weigh(scores), v)  # model.py:434
            result = result.transpose(1, 2).reshape(batch, length, width).contiguous()  # model.py:524
        answer: Tensor = self.out(result)
        return answer

    def _weigh(self, x: Tensor) -> Tensor:
        if self.style == "k":
            most = x.max(dim=-1, keepdim=True).values  # transformer.py:135
            raised = torch.exp(x - most)  # transformer.py:138
            whole = raised.sum(dim=-1, keepdim=True)  # transformer.py:140
            return raised / whole  # transformer.py:142
        x = x - torch.max(x, dim=-1, keepdim=True)[0]  # nn_utils.py:5
        raised = torch.exp(x)  # nn_utils.py:6
        return raised / torch.sum(raised, dim=-1, keepdim=True)  # nn_utils.py:7


class Feed(nn.Module):
    """SwiGLU; in style k its own products are by einsum, with the input first."""

    def __init__(self, width: int, style: str) -> None:
        super().__init__()
        self.style = style
        self.up, self.gate, self.down = (Linear(a, b, style) for a, b in (
            (width, 4 * width), (width, 4 * width), (4 * width, width)))

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.style == "k":
            gate = self.gate(x)
            up = torch.sigmoid(up) * up  # transformer.py:78
            up = up * gate  # transformer.py:79
        else:
            up = up * torch.sigmoid(up)  # model.py:532
            up = up * self.gate(x)  # model.py:399
        answer: Tensor = self.down(up)
        return answer


class Block(nn.Module):
    """Norm before each part, and what it adds."""

    def __init__(self, run: Run, rotary: Rotary) -> None:
        super().__init__()
        self.style = run.style
        self.first, self.second = Norm(run.width, run.style), Norm(run.width, run.style)
        self.attention = Attention(run.width, run.heads, rotary, run.style)
        self.feed = Feed(run.width, run.style)

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "k":
            x = x + self.attention(self.first(x))  # transformer.py:245
            x = x + self.feed(self.second(x))  # transformer.py:250
            return x
        x = x + self.attention(self.first(x))  # model.py:383
        x = x + self.feed(self.second(x))  # model.py:387
        return x


class Decoder(nn.Module):
    """Embeddings, blocks, a last norm and the head; of style k each block has tables of rotary embeddings."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.embed = Embedding(run.words, run.width, run.style)
        shared = Rotary(run.context, run.width // run.heads, run.style)
        self.blocks = nn.ModuleList([Block(run, shared if run.style == "w" else Rotary(
            run.context, run.width // run.heads, run.style)) for _ in range(run.layers)])
        self.last = Norm(run.width, run.style)
        self.head = Linear(run.width, run.words, run.style)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        answer: Tensor = self.head(self.last(x))
        return answer


class Update(torch.optim.Optimizer):
    """AdamW as each author wrote it: in place, or with new moments in each step."""

    def __init__(self, parameters: Any, style: str) -> None:
        super().__init__(parameters, {"lr": 1e-4})
        self.style = style

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], p.grad.data
                if self.style == "k":
                    if not state:
                        state["m"] = torch.zeros_like(p.data)  # optimizers.py:82
                        state["v"] = torch.zeros_like(p.data)  # optimizers.py:84
                    state["m"].mul_(0.9).add_(grad, alpha=0.1)
                    state["v"].mul_(0.95).addcmul_(grad, grad, value=0.05)
                    denominator = (state["v"].sqrt() / 0.22).add_(1e-8)  # optimizers.py:100
                    p.data.addcdiv_(state["m"], denominator, value=-1e-4)
                    p.data.add_(p.data, alpha=-1e-6)
                    continue
                before = state.get("m", torch.zeros_like(grad))
                before_squared = state.get("v", torch.zeros_like(grad))
                m = 0.9 * before + 0.1 * grad  # optimizer.py:76
                v = 0.999 * before_squared + 0.001 * torch.square(grad)  # optimizer.py:77
                p.data -= 1e-3 * m / (torch.sqrt(v) + 1e-8)  # optimizer.py:80
                p.data -= 1e-5 * p.data
                state["m"], state["v"] = m, v


class Loss(nn.Module):
    """Cross entropy as each author wrote it."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.style == "k":
            logits = logits - torch.amax(logits, dim=-1, keepdim=True)  # training.py:28
            whole = torch.exp(logits).sum(dim=-1)  # training.py:29
            own = logits.gather(dim=-1, index=targets.unsqueeze(-1)).squeeze(-1)
            losses = torch.log(whole) - own
            return losses.mean()  # training.py:33
        most = torch.max(logits, dim=-1, keepdim=True)[0]  # nn_utils.py:11
        logits = logits - most  # nn_utils.py:12
        logits = logits - torch.log(torch.sum(torch.exp(logits), dim=-1, keepdim=True))  # nn_utils.py:13
        losses = -logits  # nn_utils.py:17
        return torch.mean(torch.gather(losses, -1, targets.unsqueeze(-1)))  # nn_utils.py:18


def run_step(run: Run) -> Any:
    """What the snapshot recorded, run; the result keeps what the author's variables kept."""
    model = Decoder(run).cuda()
    optimizer, loss = Update(model.parameters(), run.style), Loss(run.style)
    x = torch.randint(run.words, (run.batch, run.context)).cuda()
    kept: list[Any] = [model, optimizer]
    for _ in range({"forward": 1, "first": 1, "later": 3}[run.step]):
        optimizer.zero_grad()
        casting = nullcontext() if run.autocast is None else torch.autocast("cuda", dtype=run.autocast)
        with casting:
            logits = model(x)
            kept[2:] = [logits]
            if run.step != "forward":
                kept[2:] = [logits, loss(logits, x)]
        if run.step != "forward":
            kept[3].backward()
            optimizer.step()
    return kept


def list_lines() -> dict[str, str]:
    """The line of the author's behind each of ours, "transformer.py:22"."""
    text = Path(__file__).read_text("utf-8").splitlines()
    return {f"{Path(__file__).name}:{number}": found[1] for number, line in enumerate(text, 1)
            if (found := re.search(r"# ([\w]+\.py:\d+)$", line)) is not None}


def align(run: Run, folder: Path) -> tuple[list[str], list[str]]:
    """A row of the table, and lines of what one side holds alone."""
    from analyzer import ProfileOptions
    from analyzer.tools.dryrun.script import dry_run
    from analyzer.tools.explain import read_snapshot
    from analyzer.tools.explain.comparison import compare_peaks
    from analyzer.tools.explain.prediction import list_at_peak
    from analyzer.tools.explain.recording.history import read_history
    from analyzer.tools.explain.recording.line import Lines
    from analyzer.tools.explain.recording.snapshot_report import name_categories

    snapshot = read_snapshot(folder / f"{run.file}.pickle.gz")
    memory, = snapshot.devices
    history, lines = read_history(memory), Lines(snapshot.stacks)
    done = dry_run(__file__, ["--run", run.file], device=run.device, steps=9,
                   options=ProfileOptions(unknown_value="placeholder"))
    if done.error is not None:
        raise done.error
    known = list_lines()
    predicted = [replace(block, source=None if block.source is None else known.get(
        Path(block.source).name, block.source)) for block in list_at_peak(done.profile)]
    found = compare_peaks(history, lines, name_categories(history, snapshot, lines), predicted)
    lined = sum([int(history.requested[block]) for block in history.at(history.peak).tolist()
                 if lines.of_block(history, block).line])
    row = [run.file, format_bytes(found.run_bytes), format_bytes(found.predicted_bytes),
           percent(found.both_bytes / max(found.run_bytes, found.predicted_bytes), 2),
           percent(found.both_same_line_bytes / lined, 2), percent(found.in_order_bytes / found.recorded_bytes, 2),
           percent(found.same_life_bytes / found.recorded_bytes, 2)]
    return row, [f"    {title}: {one.count} x {one.bytes / 2**20:.3f} MiB, {one.category}, {one.line}"
                 for title, rows in (("only in the run", found.only_run), ("before recording", found.before),
                                     ("only predicted", found.only_predicted)) for one in rows[:6]]


def main() -> None:
    """Run one step, or align all that the folder has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--run", choices=RUNS)
    parser.add_argument("--only", choices=RUNS, action="append")
    arguments = parser.parse_args()
    if arguments.run is not None:
        globals()["kept"] = run_step(RUNS[arguments.run])
        return
    if arguments.folder is None:
        parser.error("give the folder of the snapshots")
    begin, rows = time.perf_counter(), []
    for name in arguments.only or RUNS:
        row, left = align(RUNS[name], arguments.folder)
        rows.append(row)
        print("\n".join([" ".join(row), *left]), flush=True)
    table = markdown(("snapshot", "the run's peak", "predicted", "held in both", "same line", "same order",
                      "lives as long"), rows)
    publish("accuracy.md", {"accuracy.snapshot_models": f"{table}\n\n{describe_run(time.perf_counter() - begin)}"},
            is_whole=arguments.only is None)


if __name__ == "__main__":
    main()
