"""Arguments that cannot be used: the error repeats them and says how to mend it, before any work is done."""
import pytest
import torch
from torch import nn

from analyzer import Profile, ProfileOptions, profile, symbolic_profile, symbolic_trace
from analyzer.errors import InputError
from analyzer.tools.generation import profile_generate
from analyzer.tools.runtime import measure

MODEL, X = nn.Linear(4, 4), torch.ones(2, 4)


class Unused(nn.Module):
    def forward(self, x):
        raise AssertionError("the work had begun")


@pytest.fixture(scope="module")
def found():
    return profile(MODEL, args=(X,))


@pytest.mark.parametrize(("given", "words"), [
    ({"profilers": [None]}, "'profiler_0' is None, not a function of a log"),
    ({"profilers": {"flops": 3}}, "'flops' is 3, not a function of a log"),
    ({"profilers": len}, "must be a list of functions"), ({"profilers": "flops"}, "profilers='flops': must be a list"),
    ({"loss_fn": "mse"}, "loss_fn='mse': must be callable"), ({"step": "x"}, "step='x': must be callable"),
    ({"loss_fn": nn.CrossEntropyLoss()}, r"loss_fn=CrossEntropyLoss\(\): missing a required argument: 'target'; it is "
     "called with the model's output alone, so write loss_fn=lambda output: "),
    ({"optimizer": []}, r"optimizer=\[\]: give one of sgd"), ({"kwargs": [1]}, r"kwargs=\[1\]: must be a dictionary"),
    ({"kwargs": {1: 2}}, "kwargs={1: 2}: must be a dictionary"),
    ({"mode": "infer", "optimizer": "adam"}, "mode='infer', optimizer='adam': an inference step is the forward pass"),
    ({"mode": "infer", "step": print}, "mode='infer', step=print: .*; leave step out, or use mode='train'")])
@pytest.mark.parametrize("driver", [profile, measure])
def test_arguments_of_a_run(driver, given, words):
    if driver is measure and "profilers" in given:
        pytest.skip("measure takes no profilers")
    with pytest.raises(InputError, match=words):
        driver(Unused(), args=(X,), **given)


def test_what_builds_a_model_needs_no_arguments():
    for model, words in ((nn.Linear, r"model=<class '.*Linear'>: missing a required argument: 'in_features'"),
                         (len, "model=<built-in function len>: missing a required argument: 'obj'")):
        with pytest.raises(InputError, match=f"{words}; pass a module, or a function without arguments"):
            profile(model, args=(X,))


def test_steps_that_run_nothing():
    used_up = map(nn.Linear(4, 4), [X])  # once, and nothing in the second step

    def loop(model, optimizer, batches):
        for batch in batches:
            model(batch)

    def use_up(model, optimizer, x):
        for _ in used_up:
            model(x)

    with pytest.raises(InputError, match="step=loop: step 1 of 2 ran no operator. .* gave no batch: give it a list"):
        profile(MODEL, args=([],), step=loop)
    with pytest.raises(InputError, match="step=use_up: step 2 of 2 ran no operator"):
        profile(MODEL, args=(X,), step=use_up)
    with pytest.raises(InputError, match="map: an iterator among the arguments that gives nothing"):
        profile(MODEL, args=(map(abs, ()),), step=loop)


def graph_of():
    return symbolic_trace(MODEL, meta_args={"input": X})


@pytest.mark.parametrize(("use", "words"), [
    (lambda p: symbolic_profile(graph_of(), X, loss_fn="mse"), "loss_fn='mse'"),
    (lambda p: symbolic_profile(graph_of(), X, profilers=[None]), "'profiler_0' is None"),
    (lambda p: symbolic_profile(graph_of(), X, kwargs=[1]), r"kwargs=\[1\]"),
    (lambda p: ProfileOptions(capacity_bytes="8GB"), "capacity_bytes='8GB': must be positive.*parse_bytes"),
    (lambda p: ProfileOptions(capacity_bytes=True), "capacity_bytes=True"),
    (lambda p: profile(Unused(), X, options=ProfileOptions(steps=2.5)), "steps=2.5: at least one step"),
    (lambda p: profile(MODEL, X, optimizer=lambda _: None), "optimizer=.*returned None, not a torch.optim.Optimizer"),
    (lambda p: p.table(depth="x"), "depth='x'; give a depth of 1 or more"),
    (lambda p: p.module_tree(depth="x"), "depth='x'; give a depth of 0 or more"),
    (lambda p: p.table(sort=3), "no column '3'"), (lambda p: p.table(columns=3), "columns=3: give names of columns"),
    (lambda p: p.module_tree(columns="params"), "columns='params': give names of columns"),
    (lambda p: p.fits("h100", world_size="x"), "world_size='x'"), (lambda p: p.mfu("x"), "seconds='x'"),
    (lambda p: p.report("deepspeed", top_modules="x"), "top_modules='x'"),
    (lambda p: p.report("torchinfo", col_width="x"), "col_width='x'"),
    (lambda p: p.report(None), "None.*must be one of"), (lambda p: p.export(None), "None.*must be one of"),
    (lambda p: Profile.from_json(None), r"from_json\(None\): give the path"),
    (lambda p: Profile.from_json(b"{}"), r"from_json\(b'{}'\): give the path"),
    (lambda p: Profile.from_json("a\0b"), "no such file"),
    (lambda p: Profile.from_json("x" * 300), "cannot be read: File name too long"),
    (lambda p: profile_generate(MODEL, prompt_tokens="x"), "prompt_tokens='x'"),
    (lambda p: measure(MODEL, args=(X,), steps="x"), "steps='x'"),
    (lambda p: measure(MODEL, args=(X,), clock="x"), r"clock='x'\): must be a clock")])
def test_arguments_of_views_and_others(found, use, words):
    with pytest.raises(InputError, match=words):
        use(found)
