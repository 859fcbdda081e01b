"""How right the FLOP counts are; prints its tables and writes them into docs/flops.md.

    python -m benchmarks.accuracy.flops [MODEL ...] [--calls N]

With models named, only those run and nothing is written.
"""
from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import logging
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

from analyzer import profile
from analyzer.profilers.flops import make_flops_profiler
from analyzer.profilers.operator.zero import ZERO_FLOP_NAMES
from analyzer.zoo.torchvision_ops import define_torchvision_ops

define_torchvision_ops()

from benchmarks.accuracy.flop_reference import CASES, Case, Comparison, count_meta_run, count_real_run  # noqa: E402
from benchmarks.fuzz.operator_samples import sweep  # noqa: E402
from benchmarks.page import markdown, percent, publish  # noqa: E402

Rows = list[list[Any]]
CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def table(headers: list[str], rows: Rows, text: int = 1, cases: str = "") -> str:
    return markdown(headers, [[f"{v:,}" if isinstance(v, int) else v for v in row] for row in rows], text, cases)


# ---- against FlopCounterMode


def compare_models(cases: dict[str, Case]) -> tuple[str, list[Comparison]]:
    """One row a model: products compared on real CPU tensors and on the claimed GPU."""
    rows: Rows = []
    found: list[Comparison] = []
    for name, case in cases.items():
        started = time.perf_counter()
        real, real_flops, real_macs = count_real_run(case)
        meta, _ = count_meta_run(case)
        claimed, on_cpu = count_meta_run(case, device="cpu")
        flops = sum(p.flops or 0 for p in on_cpu.phases.values())
        same = "equal" if flops == real_flops else explain_total(case, real, claimed, flops, real_flops)
        rows.append([name, real.products, real.equal_flops, differing(real), meta.products, meta.equal_flops,
                     differing(meta), same])
        found += [real, meta]
        print(f"{name}: {time.perf_counter() - started:.1f} s, {len(real.unexplained + meta.unexplained)} unexplained",
              file=sys.stderr)
    return table(["model", "products, real CPU", "FLOPs equal", "calls that differ", "products, claimed GPU",
                  "FLOPs equal", "calls that differ", "whole run, real and claimed CPU"], rows,
                 cases="accuracy/flops"), found


def differing(c: Comparison) -> int:
    return sum(calls for calls, _, _ in c.differences.values()) + len(c.unexplained)


def explain_total(case: Case, real: Comparison, claimed: Comparison, flops: int, real_flops: int) -> str:
    if case.mode == "infer":
        return "not comparable: how many boxes are left is data, of which the profile takes the most"
    fused = any(CPU_ATTENTION in op for op, _ in real.differences) and not any(CPU_ATTENTION in op
                                                                               for op, _ in claimed.differences)
    why = ": attention on a claimed CPU runs as single operators" if fused else ""
    return percent(flops / real_flops - 1, 2, signed=True) + why


def list_differences(found: list[Comparison]) -> str:
    sums: dict[tuple[str, str], list[int]] = {}
    for c in found:
        for key, (calls, theirs, ours) in c.differences.items():
            row = sums.setdefault(key, [0, 0, 0])
            row[0], row[1], row[2] = row[0] + calls, row[1] + theirs, row[2] + ours
    return table(["operator", "calls", "FLOPs there", "FLOPs here", "reason"],
                 [[op, calls, theirs, ours, reason] for (op, reason), (calls, theirs, ours) in sorted(sums.items())])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def count_forward(build: Callable[[], nn.Module], args: Any, kwargs: Any, convention: str) -> Any:
    return profile(lambda: build().eval(), args=args, kwargs=kwargs, mode="infer", reuse=False,
                   profilers={"flops": make_flops_profiler(convention)})


def check_published() -> str:  # figures that DeepSpeed's documentation prints
    import torchvision
    import transformers

    resnet = count_forward(torchvision.models.resnet18, (torch.empty(16, 3, 224, 224, device="meta"),), {}, "deepspeed")
    bert = count_forward(lambda: transformers.BertModel(transformers.BertConfig()), (),
                         {"input_ids": torch.ones(1, 128, dtype=torch.int64)}, "deepspeed")
    return table(["model", "published GFLOPs", "here", "published GMACs", "here"], [
        ["ResNet-18, 16×3×224×224", "58.18", f"{resnet.fwd_flops / 1e9:.2f}", "29.03", f"{resnet.fwd_macs / 1e9:.2f}"],
        ["BERT-base, 1×128", "22.36", f"{bert.fwd_flops / 1e9:.2f}", "11.17", f"{bert.fwd_macs / 1e9:.2f}"]])


# ---- against derivations


def check_decoders() -> str:
    """6·N·T: N the weights of linear layers, T the tokens, and the attention that it leaves out."""
    from analyzer.zoo import MODELS

    rows: Rows = []
    for name, layers, width, batch, tokens in (("gpt2", 12, 768, 2, 1024), ("llama_1b", 16, 2048, 1, 2048)):
        p = profile(MODELS[name].factory, args=(torch.ones(batch, tokens, dtype=torch.int64),), reuse=False)
        assert p.modules is not None and p.params is not None and p.fwd_macs is not None and p.bwd_macs is not None
        linear = sum(t.numel for m in p.modules.walk() for n, t in m.parameters.items()
                     if len(t.shape) == 2 and "Embedding" not in m.type)
        embedded = next(t for m in p.modules.walk() if m.type == "Embedding" for t in m.parameters.values())
        if not any(m.path.endswith("lm_head") and m.parameters and not m.shared_with for m in p.modules.walk()):
            linear += embedded.numel
        t = batch * tokens
        products = 2 * (p.fwd_macs + p.bwd_macs)
        # a fused backward makes the scores once more
        fused = any("attention_backward" in o.operator for o in p.operators)
        attention = (14 if fused else 12) * layers * width * tokens * t
        rows.append([name, products, 6 * linear * t, attention, f"{14 if fused else 12}·L·d·S·T",
                     products - 6 * linear * t - attention, f"{6 * p.params * t / products:.4f}"])
    return table(["model", "FLOPs of products", "6·N·T", "attention", "which is", "left over",
                  "6·(all parameters)·T ÷ products"], rows)


def run_zero_check(calls: int) -> str:
    with quiet():
        check = sweep(calls)
    verdict = "none gave a number of its own making" if not check.guilty else "; ".join(
        f"{op}: {why}" for op, why in check.guilty.items())
    return f"{check.calls:,} calls of {len(check.names)} operators, of {len(ZERO_FLOP_NAMES)} on the list: {verdict}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--calls", type=int, default=20_000, help="calls of zero operators to look at (default 20000)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    unknown = [m for m in arguments.models if m not in CASES]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; the models are {', '.join(CASES)}")
    cases = {name: case for name, case in CASES.items() if not arguments.models or name in arguments.models}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models, found = compare_models(cases)
    uncounted = {op: n for c in found for op, n in c.uncounted.items()}
    unexplained = [line for c in found for line in c.unexplained]
    products, equal = sum(c.products for c in found), sum(c.products - differing(c) for c in found)
    machine = f"{os.cpu_count()}-core {platform.machine()} CPU"
    told = (f"{datetime.date.today()}, torch {torch.__version__}, {machine}: {len(cases)} models. {equal:,} of "
            f"{products:,} products equal, to the integer; {len(unexplained)} differences unexplained. Operators "
            f"without a formula: {uncounted or 'none'}.")
    blocks = {"counter": f"{told}\n\n{models}", "differences": list_differences(found), "deepspeed": check_published(),
              "derivations": check_decoders(), "zero": run_zero_check(arguments.calls)}
    publish("flops.md", {f"accuracy.flops {name}": text for name, text in blocks.items()}, not arguments.models)
    for line in unexplained:
        print("UNEXPLAINED", line)
    return bool(unexplained or uncounted)


if __name__ == "__main__":
    sys.exit(main())
