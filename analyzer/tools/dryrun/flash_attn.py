"""FlashAttention under a dry run: the documented functions of its package, by the operators that torch has of them."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from analyzer.meta.intercept.replacement import Undo

from .package import check_dry_run
from .saved_file import assume

# Names and arguments as in flash-attn 2.8.3, flash_attn/flash_attn_interface.py and bert_padding.py, and in hopper/
# flash_attn_interface.py of version 3. Torch's aten/src/ATen/native/transformers/cuda/flash_attn has the kernels of
# version 2, whose outputs, what is saved and workspaces are the package's.
VERSION = "2.8.3"

Tensor = torch.Tensor


def _attend(q: Tensor, k: Tensor, v: Tensor, starts: tuple[Tensor | None, Tensor | None], lengths: tuple[int, int],
            named: dict[str, Any]) -> Any:
    check_dry_run("flash_attn")
    assume(f"flash_attn: a stand-in for version {VERSION} took its place, with the kernels of it that torch has; "
           "version 3 is taken to need the same memory and time")
    window = named.get("window_size") or (-1, -1)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *starts, *lengths, named.get("dropout_p") or 0.0, bool(named.get("causal")), False,
        scale=named.get("softmax_scale"), window_size_left=None if window[0] < 0 else int(window[0]),
        window_size_right=None if window[1] < 0 else int(window[1]), alibi_slopes=named.get("alibi_slopes"))
    return (out, lse, None) if named.get("return_attn_probs") else out


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                    return_attn_probs: bool = False) -> Any:
    return _attend(q, k, v, (None, None), (q.shape[1], k.shape[1]), {
        "dropout_p": dropout_p, "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size,
        "alibi_slopes": alibi_slopes, "return_attn_probs": return_attn_probs})


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                           max_seqlen_q: Any, max_seqlen_k: Any, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                           alibi_slopes: Tensor | None = None, deterministic: bool = False,
                           return_attn_probs: bool = False, block_table: Tensor | None = None) -> Any:
    return _attend(q, k, v, (cu_seqlens_q, cu_seqlens_k), (int(max_seqlen_q), int(max_seqlen_k)), {
        "dropout_p": dropout_p, "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size,
        "alibi_slopes": alibi_slopes, "return_attn_probs": return_attn_probs})


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **named: Any) -> Any:
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **named)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **named: Any) -> Any:
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **named)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Any, *args: Any, **named: Any) -> Any:
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **named)


def _flash_attn_with_kvcache(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("flash_attn_with_kvcache: the stand-in for flash_attn in a dry run has no paged caches")


# What removes padding: the mask of a batch has no data, so every token is taken to be one of a text.

def _find_all(mask: Tensor) -> tuple[Tensor, Tensor]:
    batch, length = mask.shape
    assume("flash_attn: masks of padding have no data, and none is taken off: as many tokens are computed as the "
           "padded batch has")
    return (torch.arange(batch * length, device=mask.device),
            torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=mask.device))


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Any:
    indices, starts = _find_all(attention_mask)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, starts, attention_mask.shape[1], used


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    return x.index_select(0, indices)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    out: Tensor = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return out.index_copy(0, indices, hidden_states).reshape(batch, seqlen, *hidden_states.shape[1:])


_OF_2: dict[str, Any] = {
    "flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func,
    "flash_attn_qkvpacked_func": flash_attn_qkvpacked_func, "flash_attn_kvpacked_func": flash_attn_kvpacked_func,
    "flash_attn_varlen_qkvpacked_func": flash_attn_varlen_qkvpacked_func,
    "flash_attn_with_kvcache": _flash_attn_with_kvcache}
_PADDING = {"unpad_input": unpad_input, "pad_input": pad_input, "index_first_axis": index_first_axis}


def _flash_attn_3(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
                  window_size: tuple[int, int] = (-1, -1), **_: Any) -> Any:
    return flash_attn_func(q, k, v, 0.0, softmax_scale, causal, window_size)


def _flash_attn_varlen_3(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                         max_seqlen_q: Any, max_seqlen_k: Any, softmax_scale: float | None = None,
                         causal: bool = False, window_size: tuple[int, int] = (-1, -1), **_: Any) -> Any:
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale,
                                  causal, window_size)


#: What each module has. Others of the packages are not there.
MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": {"__version__": VERSION, **_OF_2}, "flash_attn.flash_attn_interface": _OF_2,
    "flash_attn.bert_padding": _PADDING,
    "flash_attn_interface": {"__version__": "3.0.0", "flash_attn_func": _flash_attn_3,
                             "flash_attn_varlen_func": _flash_attn_varlen_3,
                             "flash_attn_with_kvcache": _flash_attn_with_kvcache}}

# transformers asks once which packages there are, and keeps the functions that it found.

_DISTRIBUTIONS = {"flash_attn": ["flash-attn"], "flash_attn_interface": ["flash-attn-3"]}
_FOUND = ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn",
          "_process_flash_kwargs_fn")


def tell_transformers() -> Iterator[Undo]:
    """Let transformers find the packages: names of distributions, and answers that it keeps, until it is undone."""
    module = sys.modules["transformers.utils.import_utils"]
    known: dict[str, Any] = module.PACKAGE_DISTRIBUTION_MAPPING
    mine = {name: said for name, said in _DISTRIBUTIONS.items() if name not in known}
    asked = [found for name, found in vars(module).items()
             if name.startswith(("is_flash_attn", "is_liger")) and hasattr(found, "cache_clear")]

    def put_back() -> None:
        for name in mine:
            known.pop(name, None)
        for one in asked:
            one.cache_clear()

    yield put_back
    known.update(mine)
    for one in asked:
        one.cache_clear()


def forget_functions() -> Iterator[Undo]:
    """Let transformers find its functions anew afterwards."""
    module: Any = sys.modules["transformers.modeling_flash_attention_utils"]
    before = {name: getattr(module, name) for name in _FOUND if hasattr(module, name)}
    yield lambda: vars(module).update(before)
    vars(module).update(dict.fromkeys(before))

