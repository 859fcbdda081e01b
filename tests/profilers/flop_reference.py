"""What FLOPs are held against: the log's counts beside those of torch.utils.flop_counter.FlopCounterMode, kernel by
kernel on the same calls of 51 models, 26 of torchvision and 25 of transformers (``flop_models.json``), and whether the
operators on the zero list of FLOPs move values, or make them (`ZeroCheck`).

What is small is the image, the number of layers and the width; the operators are those of the full model.
"""
from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from analyzer import Profile, profile
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.flop_registry import count_call, is_zero_flop_op, result_of
from analyzer.profilers.operator.registration import tensors
from analyzer.record.eager import default_loss
from analyzer.record.log import Log
from analyzer.record.options import ProfileOptions
from benchmarks.fuzz.torch_samples import load_operators
from benchmarks.page import keep


@dataclass(frozen=True)
class Case:  # a model, what it is called with, and whether it is trained or only run forward
    name: str
    build: Callable[[], nn.Module]
    make_inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    mode: Literal["train", "infer"] = "train"
    options: dict[str, Any] = field(default_factory=dict)  #: of `ProfileOptions`


# Image sizes: the smallest round ones that the model takes (window and patch sizes must divide, or its pooling needs
# that much).
TORCHVISION = dict.fromkeys(
    "alexnet vgg11_bn resnet18 resnet50 resnext50_32x4d wide_resnet50_2 densenet121 googlenet inception_v3 "
    "squeezenet1_1 mobilenet_v2 mobilenet_v3_small mnasnet1_0 shufflenet_v2_x1_0 efficientnet_b0 regnet_y_400mf "
    "convnext_tiny vit_b_16 swin_t swin_v2_t maxvit_t fcn_resnet50 deeplabv3_mobilenet_v3_large "
    "lraspp_mobilenet_v3_large r3d_18 retinanet_resnet50_fpn".split(), 64
) | {"alexnet": 96, "inception_v3": 96, "maxvit_t": 224, "r3d_18": 32}
VIDEO_FRAMES = 4


def allow_detection() -> None:
    """Detectors refuse to run where torchvision's C++ library does not load, and the shape of ``nms`` is data: take all
    boxes.
    """
    import torchvision.extension

    from analyzer import register_shape_impl

    torchvision.extension._has_ops = lambda: True
    nms = torch.ops.torchvision.nms.default
    if nms not in register_shape_impl:
        register_shape_impl(nms, lambda boxes, scores, threshold: scores.new_empty(scores.shape[0], dtype=torch.int64))


def build_torchvision(name: str, size: int) -> nn.Module:
    import torchvision

    options: dict[str, Any] = {"weights": None}
    if name in ("googlenet", "inception_v3"):
        options.update(init_weights=False, aux_logits=False)
    if name in ("vit_b_16", "maxvit_t"):
        options["image_size" if name == "vit_b_16" else "input_size"] = size if name == "vit_b_16" else (size, size)
    if name.startswith(("fcn", "deeplab", "lraspp", "retinanet")):
        options["weights_backbone"] = None
    if name == "retinanet_resnet50_fpn":
        allow_detection()
        options.update(min_size=size, max_size=size)
    return torchvision.models.get_model(name, **options)  # type: ignore[no-any-return]


def image_inputs(name: str, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if name == "r3d_18":
        return (torch.rand(2, 3, VIDEO_FRAMES, size, size),), {}
    if name == "retinanet_resnet50_fpn":
        return ([torch.rand(3, size, size)],), {}
    return (torch.rand(2, 3, size, size),), {}


#: Name: the class of the config, its fields, the class of the model, and what it takes.
TRANSFORMERS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("flop_models.json").read_text())
BATCH, TOKENS = 2, 24


def build_transformer(name: str) -> nn.Module:
    import transformers

    row = TRANSFORMERS[name]
    config = getattr(transformers, row["config"])(**row["fields"])
    return getattr(transformers, row["model"])(config)  # type: ignore[no-any-return]


def transformer_inputs(kind: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tokens = torch.randint(3, 100, (BATCH, TOKENS))
    if kind == "pixels":
        return (), {"pixel_values": torch.rand(BATCH, 3, 32, 32)}
    if kind == "spectrogram":
        return (), {"input_features": torch.rand(BATCH, 16, 64), "labels": tokens}
    more = {"tokens and labels": {"labels": tokens.clone()},
            "tokens and mask": {"attention_mask": torch.ones_like(tokens)}}
    return (), {"input_ids": tokens, **more.get(kind, {})}


# Boxes are data: the detector runs forward only, and what depends on them has the size that the policy says.
DETECTION: dict[str, Any] = {"mode": "infer", "options": {"unknown_value": "placeholder"}}
CASES: dict[str, Case] = {
    name: Case(name, partial(build_torchvision, name, size), partial(image_inputs, name, size),
               **(DETECTION if name.startswith("retinanet") else {})) for name, size in TORCHVISION.items()
} | {name: Case(name, partial(build_transformer, name), partial(transformer_inputs, row["inputs"]))
     for name, row in TRANSFORMERS.items()}


# What its formulas miscount.
NO_FORMULA = "no formula there: counted as 0"
TRANSPOSED_BACKWARD = ("backward of a transposed convolution: the input's gradient is counted as one more transposed "
                       "convolution")
GROUPED_BACKWARD = "backward of a grouped convolution: the weight's gradient is not divided by the groups"


def find_reason(signature: Signature) -> str | None:
    """Why FlopCounterMode's count of this call is wrong; None where it is right."""
    packet = signature.op.overloadpacket
    if packet not in flop_registry:
        return NO_FORMULA
    if packet is torch.ops.aten.convolution_backward:
        transposed, groups = signature.args[7], signature.args[9]
        return TRANSPOSED_BACKWARD if transposed else GROUPED_BACKWARD if groups > 1 else None
    return None


@dataclass
class Comparison:  # both counts of one sequence of calls
    calls: int = 0
    products: int = 0                            #: calls that multiply and accumulate
    equal_flops: int = 0                         #: FLOPs of the calls that both count the same
    other_flops: int = 0                         #: of those that it leaves out by design: it counts products alone
    #: (operator, reason) → calls, theirs, ours
    differences: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    unexplained: list[str] = field(default_factory=list)
    uncounted: dict[str, int] = field(default_factory=dict)
    zero_calls: int = 0


def compare(signatures: Iterable[Signature], reference: FlopCounterMode) -> Comparison:
    """Compare call by call, and hold the sum of the reference's own formulas to what it counted (so that both saw the
    same calls).
    """
    result = Comparison()
    theirs_by_packet: dict[Any, int] = {}
    for signature in signatures:
        result.calls += 1
        ours = count_call(signature)
        if ours is None:
            result.uncounted[str(signature.op)] = result.uncounted.get(str(signature.op), 0) + 1
            continue
        result.zero_calls += is_zero_flop_op(signature.op)
        packet = getattr(signature.op, "overloadpacket", None)
        theirs = 0
        if packet in flop_registry:
            theirs = flop_registry[packet](*signature.args, **signature.kwargs, out_val=whole_result(signature))
            theirs_by_packet[packet] = theirs_by_packet.get(packet, 0) + theirs
        elif not ours.macs:
            result.other_flops += ours.flops
            continue
        result.products += 1
        if ours.flops == theirs:
            result.equal_flops += ours.flops
            continue
        reason = find_reason(signature)
        if reason is None:
            result.unexplained.append(f"{signature!r}: {theirs} there, {ours.flops} here")
            continue
        row = result.differences.setdefault((str(signature.op), reason), [0, 0, 0])
        row[0], row[1], row[2] = row[0] + 1, row[1] + theirs, row[2] + ours.flops
    counted = reference.get_flop_counts().get("Global", {})
    if {k: v for k, v in theirs_by_packet.items() if v} != {k: v for k, v in counted.items() if v}:
        result.unexplained.append(f"not the same calls: {theirs_by_packet} by its formulas, {counted} counted")
    return result


def whole_result(signature: Signature) -> Any:
    """The result with None for the gradients that a convolution was not asked for, which signatures leave out."""
    if signature.op.overloadpacket is not torch.ops.aten.convolution_backward:
        return result_of(signature)
    given = iter(signature.outputs)
    return [next(given) if wanted else None for wanted in signature.args[10]]


class SignatureLog(TorchDispatchMode):  # the signature of every operator that runs on real tensors
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.signatures: list[Signature] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        args, kwargs, result = tree_map_only(torch.Tensor, lambda t: TensorSpec.of(
            tuple(t.shape), t.stride() if t.layout is torch.strided else (), t.dtype, str(t.device)),
            (args, kwargs or {}, out))
        self.signatures.append(Signature(func, args, kwargs, tuple(tensors([args, kwargs])), tuple(tensors(result))))
        return out


def run_step(model: nn.Module, args: Any, kwargs: Any, mode: Literal["train", "infer"]) -> None:
    """Forward and, in training, backward of the default loss."""
    if mode == "infer":
        with torch.no_grad():
            model(*args, **kwargs)
    else:
        default_loss(model(*args, **kwargs)).backward()


def count_real_run(case: Case) -> tuple[Comparison, int, int]:
    """Run the model on real tensors under both counters: the comparison, and the log's FLOPs and MACs of the run."""
    torch.manual_seed(0)
    model = case.build().train(case.mode == "train")
    args, kwargs = case.make_inputs()
    with FlopCounterMode(display=False) as reference, SignatureLog() as log:
        run_step(model, args, kwargs, case.mode)
    counts = [c for c in map(count_call, log.signatures) if c is not None]
    return compare(log.signatures, reference), sum(c.flops for c in counts), sum(c.macs for c in counts)


def count_meta_run(case: Case, device: str = "h200") -> tuple[Comparison, Profile]:
    """Profile the model without data, with FlopCounterMode entered inside the recorder's own run."""
    torch.manual_seed(0)
    args, kwargs = case.make_inputs()
    logs: list[Log] = []
    references: list[FlopCounterMode] = []

    def step(model: nn.Module, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        references.append(FlopCounterMode(display=False))
        with references[-1]:
            run_step(model, args, kwargs, "train")

    def build() -> nn.Module:
        model = case.build().train(case.mode == "train")
        if case.mode == "infer":  # the step is called in training alone: the model's own forward enters the counter
            forward = model.forward

            def watched(*args: Any, **kwargs: Any) -> Any:
                references.append(FlopCounterMode(display=False))
                with references[-1]:
                    return forward(*args, **kwargs)

            model.forward = watched
        return model

    found = profile(build, args=args, kwargs=kwargs, mode=case.mode, step=step if case.mode == "train" else None,
                    device=device, profilers=[keep(logs)], reuse=False, options=ProfileOptions(steps=1, **case.options))
    return compare((c.signature for c in logs[0].calls), references[-1]), found


# ---- the list of operators that do no arithmetic

# An operator does no arithmetic if each floating number that it gives is one that it was given (cast where the dtype
# differs), a scalar among its arguments, or a constant of its definition: 0, ±1, an infinity, NaN, or a limit of the
# dtype. That is looked up number by number on real calls.
MOST_ELEMENTS = 20_000  # of a call that is looked at: larger ones only take longer
# Their results are not defined by their inputs: memory as it is, or random integers.
UNDEFINED = ("empty", "new_empty", "random", "randint", "randperm", "resize", "_empty", "set")


class ZeroCheck(TorchDispatchMode):
    """Looks at every call of an operator on the zero list; ``guilty`` names those that gave a number of their own
    making.
    """

    def __init__(self, is_zero: Callable[[Any], bool] = is_zero_flop_op) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_zero = is_zero
        self.calls = 0
        self.names: set[str] = set()
        self.guilty: dict[str, str] = {}
        self.failure: Exception | None = None  #: of the check itself

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        given = [t for t in leaves if isinstance(t, torch.Tensor)]
        looked_at = (self.is_zero(func) and torch.Tag.inplace_view not in func.tags
                     and not func._schema.name.partition("::")[2].lstrip("_").startswith(UNDEFINED)
                     and all(is_plain(t) and t.numel() <= MOST_ELEMENTS for t in given))
        before = [t.detach().clone() for t in given] if looked_at else []
        out = func(*args, **kwargs)
        if looked_at:
            try:
                self.look(func, before, given, [v for v in leaves if isinstance(v, (int, float, complex))], out)
            except Exception as error:
                self.failure = error
                raise
        return out

    def look(self, func: Any, before: list[torch.Tensor], given: list[torch.Tensor], scalars: list[Any],
             out: Any) -> None:
        self.calls += 1
        self.names.add(func._schema.name)
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        for result in tree_leaves(out):
            if not isinstance(result, torch.Tensor) or not is_plain(result) or result.numel() > MOST_ELEMENTS or not (
                    result.is_floating_point() or result.is_complex()):
                continue
            private: Any = torch._C
            if not writes and any(private._is_alias_of(result, t) for t in given):
                continue  # a view: the numbers are where they were
            made = numbers(result, result.dtype) - allowed(before, scalars, result.dtype)
            if made:
                self.guilty.setdefault(str(func), f"{len(made)} numbers, {sorted(made)[:3]}")


def is_plain(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not t.is_quantized and t.device.type == "cpu" and type(t) in (
        torch.Tensor, torch.nn.Parameter)


def numbers(t: torch.Tensor, dtype: torch.dtype) -> set[float]:
    """The distinct real numbers of a tensor (of a complex one, of both parts), as that dtype has them; NaN left out."""
    t = t.detach().resolve_conj().resolve_neg()
    real = torch.view_as_real(t) if t.is_complex() else t
    part = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}.get(
        dtype, dtype)
    values = real.to(part).to(torch.float64).flatten().unique()
    return set(values[~values.isnan()].tolist())


def allowed(before: Iterable[torch.Tensor], scalars: Iterable[Any], dtype: torch.dtype) -> set[float]:
    limits = torch.finfo(dtype)
    found = {0.0, 1.0, -1.0, float("inf"), float("-inf"), limits.max, limits.min}
    parts = [p for s in scalars for p in ((s.real, s.imag) if isinstance(s, complex) else (s,))]
    if parts:
        found |= numbers(torch.tensor([float(p) for p in parts], dtype=torch.float64), dtype)
    for t in before:
        found |= numbers(t, dtype)
    return found


def sweep(calls: int, seed: int = 0, check: ZeroCheck | None = None) -> ZeroCheck:
    """Run samples of PyTorch's own operator tests (OpInfo), in random order, until so many calls of zero operators were
    looked at.
    """
    check = check or ZeroCheck()
    dtypes = torch.float32, torch.complex64, torch.bfloat16, torch.int64
    pairs = [(op, dtype) for op in load_operators() for dtype in dtypes if dtype in op.supported_dtypes("cpu")]
    random.Random(seed).shuffle(pairs)
    for op, dtype in pairs:
        if check.calls >= calls:
            break
        try:
            samples = list(op.sample_inputs("cpu", dtype, dtype.is_floating_point and op.supports_autograd))
        except Exception:  # a test's own inputs that this build cannot make
            continue
        random.Random(seed).shuffle(samples)
        for sample in samples[:12]:
            try:
                with check:
                    out = op(sample.input, *sample.args, **sample.kwargs)
                    grads = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad
                             and t.is_floating_point()]
                    if grads:
                        torch.autograd.backward(grads, [torch.randn_like(t) for t in grads])
            except Exception:  # not to be had on this build, or a test of an error
                if check.failure is not None:
                    raise
    return check
