"""Reads a served model off the model's own operators.

One decoding pass runs under the recorder, on tensors without data. Operators between two matrix products or attentions
become one kernel, as servers fuse them; products of one input become one product. What a kernel costs is in proportion
to the tokens (or sequences) of a pass, so one recording answers for every batch, context and chunk.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from analyzer.api.argument import build_model, set_training
from analyzer.api.run import open_run
from analyzer.api.session import Session
from analyzer.fx.surroundings import leaves_no_tensor
from analyzer.record.call_table import OpCall
from analyzer.record.log import Log
from analyzer.tools.generation.decoder import (
    EncoderDecoder,
    StoredDecoder,
    TokenDecoder,
    TransformersDecoder,
    is_of_transformers,
    kept_bytes,
    prompt_shape,
    tensors_kept,
)
from analyzer.tools.generation.stored_cache import CacheForm, make_stored_cache

from .deployment import stored_format
from .pass_kernels import TOKENS, PassReading
from .served_model import ServedModel
from .tower import read_tower


@leaves_no_tensor
def read_served_model(model: nn.Module | Callable[[], nn.Module], name: str = "model") -> ServedModel:
    """The kernels of a decoding pass of ``model``: of transformers, of this package, or any that gives logits (batch,
    tokens, vocabulary) for token indices (batch, tokens). Raises InputError for a model that does not decode.
    """
    module: Any = model if isinstance(model, nn.Module) else build_model(model)
    session = Session("h100_sxm", None)
    with set_training(module, False), open_run(session, module) as run:
        with run.recording() as recorder:
            theirs = is_of_transformers(module)
            encodes = theirs and module.config.is_encoder_decoder
            shape = (TOKENS, 1) if theirs else (1, TOKENS)
            (tokens,), _ = run.take_inputs((torch.ones(shape, dtype=torch.int64),), {}, ["tokens"])
            decoder = _make_decoder(run.root, theirs, encodes)
            if isinstance(decoder, StoredDecoder):
                decoder.skip(7)  # tokens that are there
            grows = theirs and not encodes and not isinstance(decoder, StoredDecoder)
            kept = []
            # an encoder's pass, the first token's, the next one's; two where a model's own cache shows what it keeps
            for step in range(3 if encodes else 2 if grows else 1):
                recorder.start_step(step, placeholders=step == 0)
                recorder.memory.begin("forward")
                with torch.no_grad():
                    if isinstance(decoder, EncoderDecoder) and step == 0:
                        prompt, dtype = prompt_shape(module, _PROMPT)
                        decoder.encoded = decoder.model.get_encoder()(tokens.new_ones((TOKENS, *prompt), dtype=dtype))
                    else:
                        decoder.read(tokens)
                recorder.memory.end()
                kept.append(sum(x.numel() for x in tensors_kept(decoder.cache)) // TOKENS if grows else 0)
        log = recorder.log
        steps = [[call for call in log.calls if call.step == step and call.phase == "forward"]
                 for step in range(log.steps)]
        found = PassReading(log, steps[-1], cached=theirs).run()
        if isinstance(decoder, EncoderDecoder):
            found = _add_encoder(found, log, steps, decoder.encoded[0].shape[1], len(prompt) > 1)
        states, notes = 0, ""
        if isinstance(decoder, StoredDecoder):
            of_tokens = sum(x.untyped_storage().nbytes() for layer in decoder.layers() for x in layer.tensors())
            states = (kept_bytes(decoder.cache) - of_tokens) // TOKENS
        elif grows:
            states, notes = _compare_kept(found, kept, type(module).__name__)
        total = sum(parameter.numel() for parameter in module.parameters())
        tower = read_tower(module) if found.encoder is None else None
        read = [*found.products, *(tower.products if tower else ())]
        products = sum(count * product.elements for product, count in read)
        shared = found.vocabulary * found.hidden if found.shares_table else 0
        packed = getattr(getattr(module, "config", None), "quantization_config", None)
        return replace(found, name=name, state_bytes=states, tower=tower,
                       stored=stored_format(packed) if packed else None, notes=(notes,) if notes else (),
                       repository=str(getattr(getattr(module, "config", None), "_name_or_path", "")),
                       other_weights=max(0, total - products - found.table + shared))


def _compare_kept(found: ServedModel, kept: list[int], model: str) -> tuple[int, str]:
    """Bytes in 16 bits of what a cache of the model's own keeps whatever the length, by the elements that it had after
    one token and after two; and what is to be said where it grew by others than those of attention's keys and values.
    """
    grown = kept[1] - kept[0]
    read = sum(count * kernel.kv_heads * (kernel.head_dim + kernel.value_dim) for kernel, count in found.attentions
               if not kernel.is_shared)
    if grown == read:
        return 2 * (kept[0] - grown), ""
    return 2 * max(0, kept[0] - grown), (
        f"the attention of {model} is its own code: its cache grows by {2 * grown:,} bytes a token in 16 bits, and "
        f"keys and values that were found take {2 * read:,}, which the answer counts")


_PROMPT = 37  # tokens that an encoder of any number reads, a prime too


def _add_encoder(found: ServedModel, log: Log, steps: list[list[OpCall]], positions: int,
                 is_fixed: bool) -> ServedModel:
    """The encoder's kernels, by position, and the keys and values that the decoder makes of what it gives, once.
    ``is_fixed``: prompts all have that length.
    """
    encoder = PassReading(log, steps[0], cached=True, tokens=TOKENS * positions).run(is_whole=False)
    kernels = Counter(dict(encoder.kernels))
    for product, count in PassReading(log, steps[1], cached=True).run().products:
        if product.rows == positions:
            kernels[replace(product, rows=1)] += count
    return replace(found, encoder=dict(kernels), prompt_tokens=positions if is_fixed else None)


def _make_decoder(module: Any, theirs: bool, encodes: bool) -> TokenDecoder:
    if encodes:
        return EncoderDecoder(module, "dynamic", 4)
    if theirs:
        if module._can_set_attn_implementation():
            return StoredDecoder(module, CacheForm("paged"), 8, TOKENS)
        # refuses an unknown one
        make_stored_cache(module.config.get_text_config(decoder=True), CacheForm("paged"), 8)
        return TransformersDecoder(module, "dynamic", 8)  # its attention is its own code
    return TokenDecoder(module)
