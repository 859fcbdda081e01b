"""How right an epoch's reserved memory is on peft's runs of MetaMathQA: the 99th percentile over 5,000 steps.

    python -m benchmarks.accuracy.lengths --truth FILE [--only PART] [--steps N]

``--truth`` is a JSON list of the results of huggingface/peft, ``method_comparison/MetaMathQA``. Their loop is
``run.py`` there: four samples of 20 batches are sorted from long to short, the cache is emptied every ten steps, the
outputs of a step live until those of the next are there, and reserved memory is read when a step ends. Lengths are not
told: the file has 4,198,051 tokens in 20,000 samples, each with an end, of texts of at most 1,300 characters, and the
longest sample has about 656. A log-normal distribution with that mean, whose largest of 20,000 is in the median that
long, has a deviation of the logarithm of 0.306. Nothing is written.
"""
from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analyzer.tools.lengths import Epoch, EpochProfile, profile_epoch
from analyzer.zoo.target import load_target
from benchmarks.page import markdown
from benchmarks.speed.case import import_libraries

GIB = 2**30
SAMPLES, TOKENS, LONGEST = 20_000, 4_198_051, 656
MOST = 768      # max_seq_length
BUCKET = 20     # batches that are sorted together: BUCKET_FACTOR of run.py
EMPTY_EVERY = 10  # ACCELERATOR_EMPTY_CACHE_SCHEDULE of run.py


def draw_epoch(batch: int, steps: int) -> Epoch:
    """The first batches of a run, as `BucketIterator` of its ``utils.py`` makes them."""
    mean = TOKENS / SAMPLES - 1  # run.py counts an end for each sample
    z = statistics.NormalDist().inv_cdf(0.5 ** (1 / SAMPLES))
    # LONGEST = exp(mu + z s), mean = exp(mu + s^2 / 2)
    sigma = z - math.sqrt(z * z - 2 * math.log(LONGEST / mean))
    drawn = np.exp(math.log(mean) - sigma**2 / 2 + sigma * np.random.default_rng(0).standard_normal(SAMPLES))
    lengths = np.clip(np.rint(drawn), 1, MOST).astype(np.int64)
    batches = []
    for begin in range(0, SAMPLES, batch * BUCKET):
        bucket = np.sort(lengths[begin:begin + batch * BUCKET])[::-1]
        batches += [bucket[i:i + batch].tolist() for i in range(0, len(bucket), batch)]
    return Epoch.of(batches[:steps])


class Loop:
    """A step of ``run.py``; what a loop's variables hold is held until they have another value."""

    def __init__(self, clip: float) -> None:
        self.clip = clip
        self.held: dict[str, Any] = {}

    def __call__(self, model: Any, optimizer: Any, **batch: Any) -> None:
        held = self.held
        held["labels"] = batch["input_ids"].clone()
        optimizer.zero_grad()
        held["outputs"] = model(**batch, labels=held["labels"], num_items_in_batch=1_000)
        held["loss"] = held["outputs"].loss
        held["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        optimizer.step()


def build(row: dict[str, Any]) -> torch.nn.Module:
    import peft

    model: Any = load_target("hf:llama-3.2-3b").build()
    model = model.to(getattr(torch, row["train_config"]["dtype"]))
    given = row["peft_config"]
    if given is None or not given.get("peft_type"):
        return model.train()  # type: ignore[no-any-return]
    kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(given["peft_type"])]
    known = {field for base in kind.__mro__ for field in getattr(base, "__dataclass_fields__", {})}
    config = kind(**{key: value for key, value in given.items() if key in known and key != "peft_type"
                     and value is not None and key not in ("auto_mapping", "peft_version", "runtime_config")})
    return peft.get_peft_model(model, config, autocast_adapter_dtype=row["train_config"]["autocast_adapter_dtype"])


def predict(row: dict[str, Any], steps: int) -> EpochProfile:
    config = row["train_config"]

    def make(batch: int, sequence: int) -> dict[str, torch.Tensor]:
        return {name: torch.empty(batch, sequence, dtype=torch.int64, device="meta")
                for name in ("input_ids", "attention_mask")}

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, **config["optimizer_kwargs"])

    return profile_epoch(lambda: build(row), make, draw_epoch(config["batch_size"], steps), device="l40s", steps=steps,
                         empty_every=EMPTY_EVERY, courses=False, optimizer=optimizer,
                         step=Loop(config["grad_norm_clip"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--only", default="", help="rows with this in their path")
    parser.add_argument("--steps", type=int, default=2_500, help="the first so many of 5,000 steps")
    arguments = parser.parse_args()
    import_libraries()
    rows, errors = [], []
    for row in json.loads(arguments.truth.read_text("utf-8")):
        name = Path(row["path"]).stem
        if row["task"] != "MetaMathQA" or arguments.only not in name:
            continue
        begin = time.monotonic()
        told = row["accelerator_memory_reserved_99th"] / GIB
        try:
            found = predict(row, arguments.steps)
        except Exception as error:  # what peft or a model cannot do without data is told by name
            rows.append([name, f"{told:.2f}", "", "", f"{type(error).__name__}: {error}"[:80]])
            print(rows[-1], flush=True)
            continue
        p99 = found.percentile(99) / GIB
        errors.append(p99 / told - 1)
        mean = float(np.mean(found.reserved)) / GIB
        rows.append([name, f"{told:.2f}", f"{p99:.2f}", f"{errors[-1]:+.1%}",
                     f"mean {mean:.2f}, told {row['accelerator_memory_reserved_avg'] / GIB:.2f}"])
        print(rows[-1], f"{time.monotonic() - begin:.0f} s, {len(found.profiled)} profiles", flush=True)
    print(markdown(["run", "told GiB", "predicted GiB", "off", "more"], rows))
    if errors:
        sizes = sorted(map(abs, errors))
        print(f"{len(errors)} runs: median {statistics.median(sizes):.1%}, nine in ten "
              f"{sizes[math.ceil(0.9 * len(sizes)) - 1]:.1%}, bias {statistics.median(errors):+.1%}")


if __name__ == "__main__":
    main()
