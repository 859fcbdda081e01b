"""What models do besides calling layers: each as a small module."""
from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

FEATURES: list[tuple[str, Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = []


def _vector() -> tuple[Any, ...]:
    return (torch.rand(4, 8),)


def _feature(name: str, make: Callable[[], tuple[Any, ...]] = _vector) -> Callable[[Any], Any]:
    """Registers what builds a model, and what makes its inputs."""
    def register(build: Any) -> Any:
        FEATURES.append((name, build, make))
        return build

    return register


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)


def _forward(name: str, make: Callable[[], tuple[Any, ...]] = _vector, **parts: Callable[[], Any]
             ) -> Callable[[Any], Any]:
    """Registers a model with a linear layer, modules, parameters and buffers, of which a function is the forward pass.
    """
    def register(forward: Any) -> Any:
        kind = type(forward.__name__, (_Base,), {"forward": forward})

        def build() -> nn.Module:
            model = kind()
            for part, create in parts.items():
                made = create()
                if isinstance(made, (nn.Module, nn.Parameter)):
                    setattr(model, part, made)
                else:
                    model.register_buffer(part, made)
            return model

        return _feature(name, make)(build)

    return register


def _sequence() -> tuple[Any, ...]:
    return (torch.rand(2, 6, 8),)


@_forward("scaled_dot_product_attention", _sequence)
def _sdpa(self: Any, x: torch.Tensor) -> torch.Tensor:
    q = self.heads(x)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@_forward("scaled_dot_product_attention (grouped queries, mask)", _sequence)
def _grouped_sdpa(self: Any, x: torch.Tensor) -> torch.Tensor:
    q = self.heads(x)
    mask = torch.ones(6, 6, dtype=torch.bool, device=x.device).tril()
    return F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], attn_mask=mask, enable_gqa=True,
                                          dropout_p=0.1 if self.training else 0.0)


@_forward("scaled_dot_product_attention (math)", _sequence)
def _math_sdpa(self: Any, x: torch.Tensor) -> torch.Tensor:
    q = self.heads(x)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q)


@_forward("flex_attention", _sequence)
def _flex(self: Any, x: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    q = self.heads(x)
    return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.1)


@_forward("flex_attention (block mask)", lambda: (torch.rand(2, 128, 8),))
def _masked_flex(self: Any, x: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q = self.heads(x)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device=str(x.device))
    return flex_attention(q, q, q, block_mask=mask)


@_forward("nested tensors (jagged)")
def _nested(self: Any, x: torch.Tensor) -> torch.Tensor:
    nested = torch.nested.nested_tensor_from_jagged(self.linear(x), offsets=torch.tensor([0, 1, 4], device=x.device))
    return (nested * 2).values()


@_feature("nested tensors (attention)", lambda: (torch.rand(10, 16),))
class _NestedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nested = self.norm(torch.nested.nested_tensor_from_jagged(x, offsets=torch.tensor([0, 3, 10], device=x.device)))
        q, k, v = (project(nested).unflatten(-1, (2, 8)).transpose(1, 2) for project in self.projections)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2).values()


@_forward("nested tensors (padded)", lambda: (torch.rand(10, 8),))
def _nested_padded(self: Any, x: torch.Tensor) -> torch.Tensor:
    nested = torch.nested.nested_tensor_from_jagged(self.linear(x), offsets=torch.tensor([0, 3, 10], device=x.device))
    return torch.nested.to_padded_tensor(nested.relu() + 1, 0.0)


@_forward("vmap-built mask")
def _vmapped(self: Any, x: torch.Tensor) -> torch.Tensor:
    causal = torch.vmap(torch.vmap(lambda i, j: i >= j, in_dims=(None, 0)), in_dims=(0, None))
    rows = torch.arange(4, device=x.device)
    mask = causal(rows, rows)
    return torch.where(mask, self.linear(x) @ x.T, 0.0)


@_forward("torch.func.grad of a function")
def _functional_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    energy = torch.func.grad(lambda y: (y * y).sum())(x)
    return self.linear(energy)


@_forward("torch.func.functional_call, jvp and vmap of a module")
def _functional(self: Any, x: torch.Tensor) -> torch.Tensor:
    doubled = {name: p * 2 for name, p in self.linear.named_parameters()}
    tangent = torch.func.jvp(self.linear, (x,), (torch.ones_like(x),))[1]
    return torch.func.functional_call(self.linear, doubled, (x,)) + tangent + torch.vmap(self.linear)(x)


@_forward("gradient inside forward")
def _inner_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.linear(x).square().sum(), x, create_graph=True)
    return force


@_forward("optimizer that steps inside forward")
def _inner_step(self: Any, x: torch.Tensor) -> torch.Tensor:
    scale = nn.Parameter(torch.ones_like(x))
    with torch.enable_grad():
        (x.detach() * scale).square().sum().backward()
    torch.optim.SGD([scale], lr=0.1).step()
    return self.linear(x) * scale.detach()


@_forward("default dtype set in forward")
def _default_dtype(self: Any, x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    offset = torch.linspace(0, 1, 3)[2]
    torch.set_default_dtype(torch.float32)
    return self.linear(x).double() * offset


class _ByData(_Base):
    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.factor = float(x.shape[0])
        return self.linear(self.scale(x))

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor if x.sum() > 4 else x - self.factor


@_forward("attribute set before code that depends on data reads it", inner=_ByData)
def _set_before(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(x)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 3 * ctx.saved_tensors[0] * grads[0]  # not the true gradient: a trace that looks inside would differ


@_forward("autograd.Function")
def _custom(self: Any, x: torch.Tensor) -> torch.Tensor:
    return _Square.apply(self.linear(x))  # type: ignore[no-untyped-call]


@torch.library.custom_op("analyzer_benchmark::product", mutates_args=())
def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() * y.detach().numpy())


@_product.register_fake
def _product_shape(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _product_gradients(ctx: Any, grad: torch.Tensor) -> Any:
    x, y = ctx.saved_tensors
    return grad * y, grad * x


_product.register_autograd(_product_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@_forward("custom operator")
def _custom_operator(self: Any, x: torch.Tensor) -> torch.Tensor:
    return _product(self.linear(x), x)


@torch.library.triton_op("analyzer_benchmark::double", mutates_args={})
def _double(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).copy_(x * 2)  # in place of a kernel, as Triton has none for a host


_double.register_autograd(lambda ctx, grad: grad * 2, setup_context=lambda ctx, inputs, output: None)


@_forward("Triton operator")
def _triton_operator(self: Any, x: torch.Tensor) -> torch.Tensor:
    return _double(self.linear(x))


@_forward("activation checkpoint")
def _checkpointed(self: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: F.dropout(self.linear(y).relu(), 0.3, self.training), x, use_reentrant=False)


@_forward("activation checkpoint (reentrant)", lambda: (torch.rand(4, 8, requires_grad=True),))
def _reentrant(self: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(self.linear, x, use_reentrant=True)


@_forward("torch.compile'd submodule", inner=lambda: torch.compile(nn.Linear(8, 8)))
def _compiled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(self.linear(x))


@torch.compile
def _compiled_function(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * 2


@_forward("torch.compile'd function")
def _calls_compiled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return _compiled_function(self.linear(x))


@torch.jit.script
def _scripted(x: torch.Tensor, scale: float) -> torch.Tensor:
    if x.shape[0] > 2:
        return x.relu() * scale
    return x


@_forward("torch.jit.script'ed function")
def _calls_scripted(self: Any, x: torch.Tensor) -> torch.Tensor:
    return _scripted(self.linear(x), 2.0)


class _Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


@_forward("torch.jit.script'ed submodule without weights", gate=lambda: torch.jit.script(_Gate()))
def _scripted_module(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.gate(self.linear(x))


@_forward("torch.jit.script'ed submodule with weights",
          inner=lambda: torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))))
def _scripted_layer(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(self.linear(x))


@_feature("shared and tied modules")
class _Shared(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.linear
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.again(self.linear(x)))


@_feature("weight norm")
def _weight_norm() -> nn.Module:
    whole = parametrizations.weight_norm(nn.Linear(8, 8),
                                         dim=None)  # type: ignore[arg-type]  # None: over all dimensions
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU(), whole)


@_feature("weight norm (old)")
def _old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(8, 8))


_feature("spectral norm")(lambda: parametrizations.spectral_norm(nn.Linear(8, 8)))
_feature("spectral norm (old)")(lambda: nn.utils.spectral_norm(nn.Linear(8, 8)))
_feature("orthogonal weights")(lambda: parametrizations.orthogonal(nn.Linear(8, 8)))


class _Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).T


@_feature("parametrization of one's own")
def _parametrized() -> nn.Module:
    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    return layer


@_feature("pruned weights")
def _pruned() -> nn.Module:
    from torch.nn.utils import prune

    layer = nn.Linear(8, 8)
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


@_feature("hooks of all kinds")
def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda module, args, output: output + 1)
    model[2].register_full_backward_hook(lambda module, grad_input, grad_output: None)
    model.get_parameter("0.weight").register_hook(lambda grad: grad * 0.5)
    return model


@_forward("buffers changed in forward", calls=lambda: torch.zeros((), dtype=torch.int64), mean=lambda: torch.zeros(8))
def _counting(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
    self.calls.clamp_(max=1000)
    return self.linear(x - self.mean)


@_forward("layer drop")
def _layer_drop(self: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        if not self.training or torch.rand(()).item() > 0.2:
            x = self.linear(x)
    return x


@_forward("layer drop (Python's generator)")
def _python_layer_drop(self: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        if not self.training or random.random() > 2.0:
            x = self.linear(x)
    return self.linear(x)


@_forward("stochastic depth")
def _stochastic_depth(self: Any, x: torch.Tensor) -> torch.Tensor:
    keep = x.new_empty(x.shape[0], 1).bernoulli_(0.8) if self.training else x.new_ones(x.shape[0], 1)
    return x + self.linear(x) * keep / 0.8


class _RoutedExperts(nn.Module):  # each expert gets the tokens that chose it, as mixture-of-experts layers do
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.router = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            if token.numel():
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class _OffsetExperts(_RoutedExperts):  # tokens are sorted by expert and split where counts say
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        order = chosen.argsort()
        parts = x[order].split(torch.bincount(chosen, minlength=4).tolist())
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        return torch.empty_like(out).index_copy(0, order, out)


@_forward("mixture of experts (routed by nonzero)", lambda: (torch.rand(16, 8),), block=_RoutedExperts)
def _routed(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.block(self.linear(x))


@_forward("mixture of experts (routed by counts)", lambda: (torch.rand(16, 8),), block=_OffsetExperts)
def _routed_by_counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.block(self.linear(x))


@_feature("mixture of experts")
class _Experts(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.router = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        dense = x.new_zeros(x.shape[0], 4).scatter(1, chosen, weights)
        return sum((expert(x) * dense[:, i:i + 1] for i, expert in enumerate(self.experts)), self.linear(x))


@_forward("values of small tensors", lambda: (torch.rand(4, 8), torch.tensor([3, 1])))
def _values(self: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    parts = x.split(lengths.tolist())
    mask = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
    if mask.all():
        return self.linear(parts[0])
    return self.linear(torch.cat(parts[::-1])) * mask.sum() + lengths.numpy().sum().item()


@_forward("packed sequences", lambda: (torch.rand(3, 6, 8), torch.tensor([6, 4, 2])),
          rnn=lambda: nn.LSTM(8, 8, batch_first=True))
def _packed(self: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    output, _ = self.rnn(packed)
    return self.linear(nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0])


@_forward("complex numbers and FFT", filter=lambda: nn.Parameter(torch.rand(5, dtype=torch.complex64)))
def _fourier(self: Any, x: torch.Tensor) -> torch.Tensor:
    spectrum = torch.fft.rfft(self.linear(x)) * self.filter
    return torch.fft.irfft(spectrum, n=8) + torch.view_as_real(spectrum).sum((-1, -2))[:, None]


@_forward("rotary embedding by complex numbers", _sequence)
def _complex_rotary(self: Any, x: torch.Tensor) -> torch.Tensor:
    angles = torch.outer(torch.arange(6, device=x.device), 1.0 / 10000 ** (torch.arange(4, device=x.device) / 4))
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(self.linear(x).unflatten(-1, (4, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2)


@_forward("spectrogram", lambda: (torch.rand(2, 400),))
def _spectrogram(self: Any, x: torch.Tensor) -> torch.Tensor:
    spectrum = torch.stft(x, 14, hop_length=7, window=torch.hann_window(14, device=x.device), return_complex=True)
    return self.linear(spectrum.abs().transpose(1, 2))


@_forward("sparse matrix")
def _sparse(self: Any, x: torch.Tensor) -> torch.Tensor:
    edges = torch.tensor([[0, 1, 2], [1, 2, 3]])
    adjacency = torch.sparse_coo_tensor(edges, torch.ones(3), (4, 4), device=x.device)
    return torch.sparse.mm(adjacency, self.linear(x))


@_forward("linear algebra")
def _linear_algebra(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x)
    gram = y.T @ y + 8 * torch.eye(8, device=x.device)
    return torch.linalg.solve(
        gram, x.T) + torch.linalg.cholesky(gram).sum() + torch.linalg.det(gram) + torch.linalg.inv(gram).sum()


@_forward("einsum")
def _einsum(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bi,bj,ij->b", x, x, self.linear.weight) + torch.einsum("bi->b", self.linear(x))


@_forward("weights in int8", quantized=lambda: torch.randint(-127, 127, (8, 8), dtype=torch.int8),
          scale=lambda: torch.full((8, 1), 0.01))
def _int8(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(self.linear(x), self.quantized.float() * self.scale)


@_forward("product in int8", quantized=lambda: torch.randint(-127, 127, (8, 16), dtype=torch.int8))
def _int8_product(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x.repeat(5, 1))  # more than 16 rows, which is what CUDA's kernel takes
    return torch._int_mm((y * 10).to(torch.int8), self.quantized).to(y.dtype) * 0.01 + y.sum()


@_forward("product in float8", lambda: (torch.rand(16, 8),), wide=lambda: nn.Linear(8, 16),
          weight=lambda: torch.randn(16, 16).to(torch.float8_e4m3fn))
def _float8_product(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.wide(self.linear(x))
    scale = torch.ones((), device=x.device)
    with torch.no_grad():
        weight = self.weight.t()
        product = torch._scaled_mm(y.to(torch.float8_e4m3fn), weight, scale_a=scale, scale_b=scale,
                                   out_dtype=torch.bfloat16)
    return product.float() + y


@_forward("simulated quantisation")
def _fake_quantized(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(self.linear(x), 0.1, 0, -128, 127)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # takes weights with data
    _quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear}, dtype=torch.qint8)


@_forward("quantised layers", quantized=lambda: _quantized)
def _dynamically_quantized(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x)
    return self.quantized(y.detach()) + torch.quantize_per_tensor(y.detach(), 0.1, 0, torch.qint8).dequantize() + y


@_forward("weights packed to 4 bits", packed=lambda: torch.randint(0, 255, (8, 4), dtype=torch.uint8))
def _int4(self: Any, x: torch.Tensor) -> torch.Tensor:
    unpacked = torch.stack([self.packed & 15, self.packed >> 4], dim=-1).flatten(1)
    return self.linear(x) @ ((unpacked.to(x.dtype) - 8) / 8)


@_forward("autocast in forward")
def _autocast(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.linear(x).float()


@_forward("straight-through estimator")
def _straight_through(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x).softmax(-1)
    hard = F.one_hot(y.argmax(-1), 8).to(y.dtype)
    return hard - y.detach() + y + F.gumbel_softmax(y, hard=True)


@_forward("random numbers")
def _random(self: Any, x: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(4)
    noise = torch.randn_like(x) * torch.rand(1) + torch.normal(0.0, 1.0, (4, 8))
    return self.linear(x[order] + noise) * torch.bernoulli(torch.full((4, 1), 0.5))


@_forward("loops of in-place writes")
def _in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros(4, 8)
    for i in range(4):
        out[i] = self.linear(x[i]) + out[i - 1]
    out[:, ::2] *= 2
    out.masked_fill_(torch.eye(4, 8, dtype=torch.bool), 0.5).index_add_(0, torch.tensor([0, 2]), x[:2])
    return out


@_forward("sorting and searching")
def _sorting(self: Any, x: torch.Tensor) -> torch.Tensor:
    values, order = self.linear(x).sort(-1)
    place = torch.searchsorted(torch.linspace(0, 1, 5), x)
    return values.cumsum(-1).gather(1, order) + place + x.median(1, keepdim=True).values + torch.kthvalue(
        x, 2, dim=1, keepdim=True)[0]


@_forward("grid sampling", lambda: (torch.rand(2, 8, 5, 8),))
def _grid_sample(self: Any, x: torch.Tensor) -> torch.Tensor:
    grid = F.affine_grid(torch.eye(2, 3).expand(2, 2, 3), [2, 8, 5, 8], align_corners=False)
    return F.grid_sample(self.linear(x), grid, align_corners=False)


class _Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class _Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()
    name: str = ""


@_forward("named tuples and dataclasses")
def _structured(self: Any, x: torch.Tensor) -> _Output:
    pair = _Pair(self.linear(x), x * 2)
    parts: dict[str, Any] = {"first": pair.first, "rest": [pair.second, *pair.first.chunk(2, dim=1)]}
    return _Output(parts["first"] + pair.second, tuple(parts["rest"]), "done")


@_forward("nested arguments", lambda: ({"x": torch.rand(4, 8), "scales": [torch.rand(1), 2.0]}, (torch.rand(8),)))
def _nested_arguments(self: Any, batch: dict[str, Any], shifts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return self.linear(batch["x"]) * batch["scales"][0] * batch["scales"][1] + shifts[0]


@_forward("gradient reversal and stop")
def _detached(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = self.linear(x)
    with torch.no_grad():
        target = self.linear(x).softmax(-1)
    return y + target, y.detach().requires_grad_(False)


@_forward("distributions")
def _distribution(self: Any, x: torch.Tensor) -> torch.Tensor:
    mean, deviation = self.linear(x).chunk(2, dim=1)
    normal = torch.distributions.Normal(mean, F.softplus(deviation) + 0.1, validate_args=False)
    return normal.log_prob(normal.rsample()) + torch.distributions.kl_divergence(
        normal, torch.distributions.Normal(0.0, 1.0))


@_forward("distributions that check their arguments")
def _checked_distribution(self: Any, x: torch.Tensor) -> torch.Tensor:
    mean, deviation = self.linear(x).chunk(2, dim=1)
    normal = torch.distributions.Normal(mean, F.softplus(deviation) + 0.1)
    return normal.log_prob(normal.rsample()) + torch.distributions.kl_divergence(
        normal, torch.distributions.Normal(0.0, 1.0))


@_forward("assertions on data")
def _asserting(self: Any, x: torch.Tensor) -> torch.Tensor:
    torch._assert(x.dim() == 2, "a matrix")
    y = self.linear(x)
    torch._assert_async(torch.isfinite(y).all())
    return y


@_forward("data-dependent sizes")
def _sizes(self: Any, x: torch.Tensor) -> torch.Tensor:
    mask = torch.tensor([True, False, True, True])
    picked = self.linear(x)[mask]
    return picked[torch.tensor([3, 0, 1]).nonzero().flatten()] + torch.unique(torch.tensor([2, 2, 5])).sum()


class _Distinct(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x[x.sum(-1) > 0]
        if kept.shape[0] == 0:
            return kept.sum(0)
        classes, places = torch.unique((kept * 2).long().flatten(), return_inverse=True)
        sums = torch.zeros(len(classes), device=x.device).index_add(0, places, kept.flatten())
        return torch.stack([s * i for i, s in enumerate(sums.unbind())]).sum()


@_forward("sizes that only data gives", lambda: (torch.rand(4, 8),), distinct=_Distinct)
def _unknown_sizes(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.distinct(self.linear(x)) * 2
