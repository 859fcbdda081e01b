"""Stand-ins for tokenizers: of a model, made of its config, and of tiktoken's encodings."""
from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from analyzer.meta.intercept.replacement import Undo, answer

from .saved_file import NotThereError, assume

#: Words that are tokens of their own, with and without a space before: frequent ones of English texts, and of templates
#: of prompts. All other text has a token for each byte, or for the beginning of a word that is as one of these.
_WORDS = ("the of and to in is that it for as was with be by on not he his but at are this have from or had an they "
          "which one you were all her she there would their we him been has when who will no more if out so up said "
          "what its about than into them can only other time new some could these two may first then do any like my "
          "now over such our even most made after also did many user assistant system instruction response input "
          "question answer sentence context text label").split()
_SPACE = "\u0120"  # how a byte-level BPE writes it
_BYTES = 256
_TURN = ("<|im_start|>", "<|im_end|>")
_CHAT = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == \
'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ \
message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ \
'<|im_start|>assistant\\n' }}{% endif %}"""


def write_tokenizer(folder: Path, name: str) -> None:
    """A byte-level BPE, padded to the vocabulary of the config with tokens that no text has."""
    from transformers import AutoConfig

    save_tokenizer(folder, name, AutoConfig.from_pretrained(folder))


def save_tokenizer(folder: Path, name: str, config: Any) -> None:
    text = config.get_text_config()
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int):
        return  # a model without texts
    masks = any(cls.endswith("ForMaskedLM") for cls in config.architectures or ())
    kind, names = _find_own_parts(config.model_type)
    special, numbers = _choose_special_tokens(config, text, size, masks, names)
    vocabulary, merges = _make_vocabulary(size, special, numbers)
    tokenizer = _make_tokenizer(vocabulary, merges, special, masks, config.is_encoder_decoder)
    if kind == "Unigram":
        tokenizer.model = _make_unigram(vocabulary, special)
    tokenizer.save(str(folder / "tokenizer.json"))
    longest = getattr(text, "max_position_embeddings", None)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "clean_up_tokenization_spaces": False,
                **({"chat_template": _CHAT} if _TURN[0] in vocabulary else {}),
                **({"model_max_length": longest} if isinstance(longest, int) and longest > 0 else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    assume(f"{name}: its tokenizer is a stand-in with a vocabulary of {size:,} and the chat template ChatML: lengths "
           "of texts are not those of the real one")


def _find_own_parts(model_type: str) -> tuple[str, dict[str, str]]:
    """The kind of the tokenizer that transformers has for a model, and how its class names its tokens, where it makes
    itself of a vocabulary of that kind alone (tokenization_utils_tokenizers.py, `convert_to_native_format`).
    """
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    found = getattr(transformers, TOKENIZER_MAPPING_NAMES.get(model_type) or "", None)
    kind = getattr(getattr(found, "model", None), "__name__", "")
    if found is None or kind not in ("Unigram", "WordPiece", "BPE"):
        return "", {}
    defaults = {name: option.default for cls in reversed(found.__mro__)
                for name, option in inspect.signature(vars(cls).get("__init__", object)).parameters.items()}
    names = {name.removesuffix("_token"): token for name, token in defaults.items()
             if name.endswith("_token") and isinstance(token, str)}
    if kind == "BPE" and names.get("unk") in (None, names.get("eos"), names.get("bos")):
        return "", {}  # of pairs of bytes, of which none is unknown
    return kind, names


def _make_unigram(vocabulary: Mapping[str, int], special: Mapping[str, str]) -> Any:
    """Of the same tokens: the fewest pieces are likeliest."""
    from tokenizers import models

    names = sorted(vocabulary, key=vocabulary.__getitem__)
    unknown = vocabulary[special.get("unk_token", special["pad_token"])]
    return models.Unigram([(name, -1.0) for name in names], unknown, False)


def _choose_special_tokens(config: Any, text: Any, size: int, masks: bool,
                           own: Mapping[str, str]) -> tuple[dict[str, str], dict[str, int]]:
    """The tokens by their kinds, and the numbers of those that the config numbers: one for kinds of the same number."""
    tokens: dict[int, str] = {}
    special: dict[str, str] = {}
    is_clip = config.model_type.startswith("clip")  # whose tokenizer knows its tokens by these names
    names = {"bos": "<|startoftext|>", "eos": "<|endoftext|>"} if is_clip else own
    for kind in ("eos", "bos", "pad"):
        found = [getattr(part, f"{kind}_token_id", None) for part in (text, config)]
        number = next((number for number in found if number is not None), None)
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and 0 <= number < size:
            special[f"{kind}_token"] = tokens.setdefault(number, names.get(kind, f"<{kind}>"))
    special.setdefault("eos_token", names.get("eos", "<eos>"))
    special.setdefault("pad_token", names.get("pad", "<pad>"))
    for kind in ("cls", "sep", "mask", "unk"):
        if kind in own or masks and kind != "unk":
            special[f"{kind}_token"] = own.get(kind, f"<{kind}>")
    if is_clip:
        special["unk_token"] = special["eos_token"]
    elif size < 2 * _BYTES:  # there may be no place for each byte
        special["unk_token"] = "<unk>"
    return special, {token: number for number, token in tokens.items()}


def _make_vocabulary(size: int, special: Mapping[str, str],
                     numbers: Mapping[str, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    from tokenizers.pre_tokenizers import ByteLevel

    at: dict[int, str] = {number: token for token, number in numbers.items()}
    last = iter([number for number in reversed(range(size)) if number not in at])
    turn = _TURN if size >= 2 * _BYTES else ()
    for token in dict.fromkeys((*special.values(), *turn)):
        if token not in numbers:
            at[next(last)] = token
    letters = sorted(ByteLevel.alphabet(), key=lambda c: (not (c == _SPACE or c.isascii() and c.islower()), ord(c)))
    merges: dict[tuple[str, str], None] = {}
    for word in _WORDS:
        merges |= dict.fromkeys([(word[:end], word[end]) for end in range(1, len(word))] + [(_SPACE, word)])
    room = size - len(at) - len(letters)
    kept = list(merges)[:max(room, 0)]
    pieces = iter([*letters, *dict.fromkeys(first + second for first, second in kept)])
    for number in range(size):
        if number not in at:
            at[number] = next(pieces, f"<unused{number}>")
    return {token: number for number, token in sorted(at.items())}, kept


def _make_tokenizer(vocabulary: dict[str, int], merges: list[tuple[str, str]], special: Mapping[str, str], masks: bool,
                    is_encoder_decoder: bool) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=special.get("unk_token")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    turn = [token for token in _TURN if token in vocabulary]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token in dict.fromkeys((*special.values(), *turn))])

    def mark(single: str, pair: str, *kinds: str) -> None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(special[kind], vocabulary[special[kind]]) for kind in kinds])

    if masks:
        cls, sep = special["cls_token"], special["sep_token"]
        mark(f"{cls} $A {sep}", f"{cls} $A {sep} $B:1 {sep}:1", "cls_token", "sep_token")
    elif is_encoder_decoder:
        eos = special["eos_token"]
        mark(f"$A {eos}", f"$A {eos} $B {eos}", "eos_token")
    return tokenizer


# tiktoken's encodings, which it downloads once: by a part of the address the numbers of tokens that are not special.
# `explicit_n_vocab` in tiktoken_ext/openai_public.py tells those of GPT-2, r50k and p50k, which has a special one among
# them; the files of the others have so many lines.
_ENCODINGS = {"gpt-2/": range(50_256), "r50k_base": range(50_256),
              "p50k_base": [*range(50_256), *range(50_257, 50_281)],
              "cl100k_base": range(100_256), "o200k_base": range(199_998)}
_ADDRESS = "://"


def stand_in_for_encodings() -> dict[str, Callable[[], Iterator[Undo]]]:
    """What to replace in which modules of tiktoken, once they are imported, so that none is downloaded."""
    def load() -> Iterator[Undo]:
        yield answer(sys.modules["tiktoken.load"], "read_file", _read_here, passes_original=True)

    def make() -> Iterator[Undo]:
        registry: Any = sys.modules["tiktoken.registry"]
        yield partial(_forget_others, registry.ENCODINGS, set(registry.ENCODINGS))
        for name in ("data_gym_to_mergeable_bpe_ranks", "load_tiktoken_bpe"):
            yield answer(sys.modules["tiktoken_ext.openai_public"], name, _make_ranks, passes_original=True)

    return {"tiktoken.load": load, "tiktoken_ext.openai_public": make}


def _forget_others(encodings: dict[str, Any], known: set[str]) -> None:
    for name in encodings.keys() - known:
        del encodings[name]


def _read_here(original: Any, path: str) -> Any:
    if _ADDRESS in path:
        raise NotThereError(f"{path} would be downloaded; nothing is, unless --allow-download is given. Download it "
                            "once and give its path")
    return original(path)


def _make_ranks(original: Any, *args: Any, **kwargs: Any) -> Any:
    """The ranks that were downloaded before, else as many: bytes, beginnings of frequent words, what no text has."""
    try:
        return original(*args, **kwargs)
    except NotThereError:
        path = next(iter((*args, *kwargs.values())))
        name = next((name for name in _ENCODINGS if name in path), None)
        if name is None:
            raise
    assume(f"tiktoken's encoding {name.strip('/')} is a stand-in of as many tokens: lengths of texts are not those of "
           "the real one")
    pieces = [bytes([number]) for number in range(_BYTES)]
    for word in _WORDS:
        pieces += [word[:end].encode() for end in range(2, len(word) + 1)] + [f" {word}".encode()]
    known = iter(dict.fromkeys(pieces))
    return {next(known, f"<unused{rank}>".encode()): rank for rank in _ENCODINGS[name]}
