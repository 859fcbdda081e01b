"""Scripts with trainers and optimizers of other libraries: Lightning, Accelerate, bitsandbytes, torchao."""
from __future__ import annotations

import pytest

PARAMETERS = 512 * 256 + 512 + 8 * 512 + 8
LARGE, MIDDLE, SMALL = 512 * 256, 8 * 512, 512 + 8  # elements of the tensors that have 4,096 or more, and of the others
MACS = 64 * (256 * 512 + 512 * 8)
QMAPS = 2 * 256 * 4


def test_trainers_of_other_libraries(run_dry):
    for name in ("lightning", "accelerate"):
        pytest.importorskip(name)
    profiles = run_dry(("lightning", "lightning_fit.py", []), ("accelerate", "accelerate_loop.py", []))
    for name, p in profiles.items():
        assert (p.params, p.mode, p.optimizer, p.batch_size) == (PARAMETERS, "train", "AdamW", 128), name
        assert p.fwd_macs == 2 * MACS and p.bwd_macs == 2 * (2 * MACS - 64 * 256 * 512), name  # two micro-batches
        assert p.optimizer_bytes == 2 * 4 * PARAMETERS, name  # steps are counted on the host
        assert p.peak_by_category["gradient"] == 4 * (PARAMETERS + 120), name  # the last in a block of 512 bytes
        assert not p.uncounted and p.peak_by_category.keys() <= {
            "workspace", "optimizer state", "temporary", "parameter", "gradient", "input", "activation"}, name


def test_states_of_few_bits(run_dry):
    for name in ("bitsandbytes", "torchao"):
        pytest.importorskip(name)
    bitsandbytes = ("AdamW8bit", "PagedAdamW8bit", "Lion8bit", "AdamW")
    torchao = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
    profiles = run_dry(*((f"bnb {name}", "bnb_optimizer.py", [name]) for name in bitsandbytes),
                       *((f"ao {name}", "torchao_optimizer.py", [name]) for name in torchao))
    eight = LARGE + MIDDLE  # elements with states of 8 bits
    blocks = eight // 256
    expected = {
        "bnb AdamW8bit": 2 * eight + 2 * 4 * blocks + 2 * 4 * SMALL + QMAPS,
        # paged states of the large tensor are in unified memory, which is not the device's
        "bnb PagedAdamW8bit": 2 * MIDDLE + 2 * 4 * blocks + 2 * 4 * SMALL + QMAPS,
        "bnb Lion8bit": eight + 4 * blocks + 4 * SMALL + QMAPS // 2,
        "bnb AdamW": 2 * 4 * PARAMETERS,
        # each tensor has maps of its own
        "ao AdamW8bit": 2 * (eight + 4 * blocks) + 2 * QMAPS + 2 * 4 * SMALL,
        "ao AdamW4bit": 2 * (eight // 2 + 4 * eight // 128) + 2 * 2 * 16 * 4 + 2 * 4 * SMALL,
        "ao AdamWFp8": 2 * (eight + 4 * blocks) + 2 * 4 * SMALL}
    assert {name: p.optimizer_bytes for name, p in profiles.items()} == expected
    for name, p in profiles.items():
        assert (p.params, p.fwd_macs, p.uncounted) == (PARAMETERS, MACS, ()), name
    # AdamW's 13 operations, its decay, and four to dequantize and quantize what has 8 bits
    assert profiles["bnb AdamW8bit"].optimizer_flops == 14 * PARAMETERS + 4 * eight
    paged = profiles["bnb PagedAdamW8bit"]
    assert any("managed memory" in a for a in paged.assumptions)
    saved = profiles["bnb AdamW8bit"].peak_by_category["optimizer state"] - paged.peak_by_category["optimizer state"]
    assert saved == 2 * LARGE  # what has 100,000 elements or more is in managed memory, its scales are not


def test_weights_of_few_bits(run_dry):
    torchao = pytest.importorskip("torchao.quantization")
    import torch
    from torch import nn

    names = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig",
             "Float8DynamicActivationFloat8WeightConfig")
    profiles = run_dry(*((name, "torchao_quantized.py", [name]) for name in names))
    for name, p in profiles.items():
        assert p.fwd_macs == 2 * 64 * 256 * 512, name
        assert p.params == 2 * 256 * 512 + 512 + 256 and not p.uncounted, name
    for name in names[:3]:  # as on data: parts of each weight, biases in bfloat16
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to(torch.bfloat16)
        torchao.quantize_(model, getattr(torchao, name)())
        parts = [getattr(weight, part) for weight in (model[0].weight, model[2].weight)
                 for part in weight.__tensor_flatten__()[0]]
        assert profiles[name].param_bytes == sum(part.nbytes for part in parts) + 2 * (512 + 256), name
    last = profiles[names[3]].param_bytes
    assert last is not None and 0 < last - 2 * 256 * 512 - 2 * (512 + 256) <= 4 * (512 + 256)  # scales of rows
