"""Every table's columns add up, over eight models: a module is its children and its own row, in the records and in
what is printed.
"""
import csv
import io
import math

import pytest
import torch

from analyzer import profile
from analyzer.results.info import CostInfo
from analyzer.zoo.gpt2 import GPT2

IDS = torch.ones(2, 16, dtype=torch.int64)


def image(size):
    return (torch.empty(2, 3, size, size, device="meta"),), {}


def text():
    return (), {"input_ids": IDS}


def torchvision_model(name, **options):
    def build():
        models = pytest.importorskip("torchvision").models
        return getattr(models, name)(**options)
    return build


def transformers_model(name, **options):
    """The base model, or the one with a head that ``name`` says, of small sizes."""
    def build():
        transformers = pytest.importorskip("transformers")
        config, _, head = name.partition(":")
        return getattr(transformers, head or f"{config}Model")(getattr(transformers, f"{config}Config")(**options))
    return build


SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100
}
MODELS = {
    "shufflenet_v2_x0_5": (torchvision_model("shufflenet_v2_x0_5"), image(32)),
    "swin_t": (torchvision_model("swin_t"), image(64)),
    "gpt2 of the zoo": (lambda: GPT2(vocabulary=100, positions=16, hidden=32, layers=2, heads=4), ((IDS, ), {})),
    "albert, whose layers are one": (transformers_model("Albert", embedding_size=16, **SMALL), text()),
    "mixtral": (transformers_model("Mixtral", num_key_value_heads=2, **SMALL), text()),
    "mamba": (transformers_model("Mamba", hidden_size=32, num_hidden_layers=2, vocab_size=100), text()),
    "t5, with tied embeddings": (transformers_model("T5:T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=64,
                                                    num_layers=2, num_heads=4, vocab_size=100, decoder_start_token_id=0,
                                                    pad_token_id=0), ((), {"input_ids": IDS, "labels": IDS})),
    "deberta": (transformers_model("DebertaV2", **SMALL), text()),
}


@pytest.fixture(scope="module", params=MODELS)
def profiled(request):
    build, (args, kwargs) = MODELS[request.param]
    return profile(build, args=args, kwargs=kwargs, mode="train", optimizer="adamw")


def test_records(profiled):
    for module in profiled.modules.walk():
        for name in CostInfo.__slots__:
            whole, parts = getattr(module, name), [getattr(part, name) for part in (*module.children, module.own)]
            assert None not in (whole, *parts), (module.path, name)
            assert whole == sum(parts) or math.isclose(whole, math.fsum(parts), rel_tol=1e-9,
                                                       abs_tol=1e-15), (module.path, name)
    root = profiled.modules
    assert (root.params, root.fwd_flops, root.bwd_flops) == (profiled.params, profiled.fwd_flops, profiled.bwd_flops)
    assert math.isclose(root.fwd_seconds, profiled.phases["forward"].kernel_seconds)
    assert math.isclose(root.bwd_seconds, profiled.phases["backward"].kernel_seconds)
    for bound in ("arithmetic", "memory", "latency"):  # what kernels wait for; what they wait for before is beside it
        of_phases = [getattr(profiled.phases[phase], f"{bound}_seconds") for phase in ("forward", "backward")]
        assert math.isclose(getattr(root, f"{bound}_seconds"), math.fsum(of_phases), abs_tol=1e-12)
    assert math.isclose(root.optimizer_seconds, profiled.optimizer_seconds)


def test_operators_are_what_a_module_does_itself(profiled):
    for module in profiled.modules.walk():
        forward = [row for row in module.operators if row.phase == "forward"]
        assert sum(row.flops or 0 for row in forward) == module.own.fwd_flops, module.path
        assert math.isclose(math.fsum(row.seconds or 0.0 for row in forward), module.own.fwd_seconds,
                            abs_tol=1e-15), module.path


@pytest.mark.parametrize("depth", [1, 9])
def test_printed_torchinfo_table(profiled, depth):
    table = profiled.report("torchinfo", depth=depth, fmt="csv", col_names=("num_params", "mult_adds"))
    rows = list(csv.DictReader(io.StringIO(table)))

    def total(name):
        numbers = [row[name].strip("()").replace(",", "") for row in rows]
        return sum(int(number) for number in numbers if number.isdigit())

    assert total("Param #") == profiled.params
    assert total("Mult-Adds") == profiled.fwd_macs
