"""What programs that serve models share: formats of weights and caches by their names, numbers as people write them."""
from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..document import Document, Edit
from ..model_name import named_format
from ..options import OptionReading, Options
from ..plan import ServingPlan
from ..program import Change


class _Format(NamedTuple):
    weights: str | None = None   # None: as the checkpoint's config says
    experts: str | None = None
    said: str = ""


_EXPERTS = "experts of 4 bits, a scale of 8 bits for 32 of them"
_PACKED = _Format("int4", said="weights of 4 bits, a scale of 16 bits for 128 of them")
_ONLINE = _Format("fp8", said="weights of 8 bits")
_NVFP4 = _Format("nvfp4", said="weights of 4 bits, a scale of 8 bits for 16 of them")
#: vLLM 0.33, model_executor/layers/quantization/__init__.py and config/quantization.py, SGLang 0.5.23,
#: srt/arg_groups/choices.py, QUANTIZATION_CHOICES, and what both had before.
METHODS = {
    "fp8": _ONLINE, "fbgemm_fp8": _ONLINE, "ptpc_fp8": _ONLINE, "modelopt": _ONLINE, "modelopt_fp8": _ONLINE,
    "w8a8_fp8": _ONLINE, "fp8_per_tensor": _ONLINE, "fp8_per_block": _Format("fp8-block", said="weights of 8 bits"),
    "awq": _PACKED, "awq_marlin": _PACKED, "gptq": _PACKED, "gptq_marlin": _PACKED, "gptq_marlin_24": _PACKED,
    "auto-round": _PACKED, "inc": _PACKED, "moe_wna16": _PACKED, "qoq": _PACKED, "cpu_awq": _PACKED,
    "bitsandbytes": _PACKED, "bitblas": _PACKED, "gptq_bitblas": _PACKED,
    "w8a8_int8": _Format("int8", said="weights of 8 bits"),
    "experts_int8": _Format("bf16", "int8", "experts of 8 bits"),
    "int8_per_channel_weight_only": _Format("bf16", "int8", "experts of 8 bits"),
    "nvfp4_per_token": _Format("bf16", "nvfp4", "experts of 4 bits, a scale of 8 bits for 16 of them"),
    "w4afp8": _Format("fp8", "int4", "weights of 8 bits, experts of 4"),
    "mxfp4": _Format("bf16", "mxfp4", _EXPERTS), "gpt_oss_mxfp4": _Format("bf16", "mxfp4", _EXPERTS),
    "nvfp4_online": _NVFP4, "auto_awq": _PACKED, "auto_gptq": _PACKED, "marlin": _PACKED, "fp8_per_channel": _ONLINE,
    "auto-round-int8": _Format("int8", said="weights of 8 bits"),
    **{name: _Format("fp8", said="weights of 8 bits, their scales left out") for name in ("mxfp8", "modelopt_mxfp8")},
    **{name: _Format() for name in ("online", "deepseek_v4_fp8", "unquant", "humming", "fp_quant", "modelslim",
                                    "mxfp_w4a8", "quark_int4fp8_moe", "quark_mxfp4", "mlx_q4", "mlx_q8")},
    "modelopt_fp4": _NVFP4, "petit_nvfp4": _NVFP4, "modelopt_mixed": _NVFP4,
    "compressed-tensors": _Format(), "quark": _Format(), "torchao": _Format(), "gguf": _Format(), "none": _Format()}
_CACHES = {"auto": None, "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp8": "fp8", "fp8_e4m3": "fp8",
           "fp8_e5m2": "fp8", "fp8_inc": "fp8", "fp8_ds_mla": "fp8", "fp8_per_token_head": "fp8",
           "int8_per_token_head": "int8", "mxfp8": "fp8"}
#: Caches of fewer bits: vLLM 0.33, config/cache.py, `CacheDType`; SGLang's kv_cache_dtype.
_SMALLER = """nvfp4 nvfp4_4over6 nvfp4_ds_mla int4_per_token_head turboquant_k8v4 turboquant_4bit_nc turboquant_k3v4_nc
turboquant_3bit_nc octave_k3v4 octave_k3v3 octave_k3v3_compact ultraquant_4bit fp4_mx_block16 fp4_e2m1""".split()
_DTYPES = {"auto": "bf16", "bfloat16": "bf16", "half": "fp16", "float16": "fp16"}


def read_weights(options: Options, model: str, name: str = "model") -> tuple[str | None, str | None]:
    """The formats of weights and experts: by ``quantization``, by the model's name, by ``dtype``; None: as the
    checkpoint's config says. Raises JobError for a method that the server does not know.
    """
    method = options.text("quantization", choices=METHODS, means="how weights are held")
    dtype = options.text("dtype", "auto", choices=(*_DTYPES, "float", "float32"))
    named = named_format(model)
    if dtype in ("float", "float32"):
        options.note("dtype", "not modelled", "weights of 16 bits are taken, half of what these take")
    found = METHODS[method] if method is not None else _Format()
    if method is not None and found.weights is not None:
        said = found.said
        if method == "bitsandbytes":
            said = "weights of 4 bits"
        if method in ("gptq", "gptq_marlin") and named == "int8":
            found, said = _Format("int8"), "weights of 8 bits, as the model's name says"
        options.note("quantization", "understood", said)
        return found.weights, found.experts
    if method is not None and method not in ("none", "unquant", "compressed-tensors"):
        options.note("quantization", "assumed", "its formats are not known: as the model's name says, else 16 bits")
    if named is not None:
        options.readings.append(OptionReading("weights", named, "assumed", "by the model's name", options.place(name)))
        return named, None
    return (None if dtype == "auto" else _DTYPES.get(dtype or "auto", "bf16")), None


def read_cache(options: Options) -> str | None:
    """The format of the cache; None: as weights are computed with."""
    said = options.text("kv_cache_dtype", "auto", choices=(*_CACHES, *_SMALLER), means="how keys and values are held")
    if said in _CACHES:
        return _CACHES[said]
    options.note("kv_cache_dtype", "not modelled", f"{said}: a cache of 8 bits is taken")
    return "fp8"


_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def read_human(options: Options, name: str, *, means: str = "") -> int | None:
    """A whole number that may end in k, m, g (thousands) or K, M, G (1,024s): 32k is 32,000, 32K is 32,768 (vLLM's
    engine/arg_utils.py, `human_readable_int`). Raises JobError for anything else.
    """
    value = options.get(name)
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", value.strip())):
        number = float(match[1]) * _SUFFIXES[match[2]]
        if number != int(number) or not number:
            raise options.fail(name, "is no whole number")
        options.note(name, "understood", f"{means}: {int(number):,}" if means else f"{int(number):,}")
        return int(number)
    return options.number(name, least=1, means=means)


def read_json_option(options: Options, name: str) -> Mapping[str, Any] | None:
    """The mapping that an option holds, as JSON text or written out. Raises JobError for what is none."""
    value = options.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise options.fail(name, f"must be JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise options.fail(name, "must be a mapping in JSON")
    return value


def fold_names(options: Options, aliases: Mapping[str, str]) -> Options:
    """The same options with underscores for hyphens, short names written out, and ``no_x`` as x: false."""
    layers: list[tuple[Document, Mapping[str, Any]]] = []
    for document, values in options.layers:
        folded, lines = {}, dict(document.lines)
        for name, value in values.items():
            full = name.replace("-", "_")
            full = aliases.get(full, full)
            if full.startswith("no_enable_") and value in (True, "true", "True"):
                full, value = full.removeprefix("no_"), False
            folded[full] = value
            if (name,) in lines:
                lines[full,] = lines[name,]
        layers.append((replace(document, lines=lines), folded))
    options.layers = layers
    return options


def set_server_option(*names: str) -> Change:
    """A change of an option of a server's command, by any of its names as they were given, else by the first."""
    def change(options: Options, plan: ServingPlan, wanted: Any) -> list[Edit]:
        document = options.layers[-1][0]
        for name in names:
            for written in (name, name.replace("-", "_")):
                if written in document.data:
                    return [Edit((written,), document.data[written], wanted)]
        return [Edit((names[0],), None, wanted)]
    return change
