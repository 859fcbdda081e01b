"""What the two trainers of ms-swift share: the model, the length of rows, what trains, and how weights are held."""
from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..model_name import find_config
from ..options import Options
from ..plan import PROJECTORS, TOWERS, Adapter, Task
from ..program import JobLaunch
from .trainer import read_published_format

# ms-swift 4.6, swift/arguments/

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_UNKNOWN_LENGTH = 2_048  # tokens of a row where neither the configuration nor the model says how many
_VISION, _ALIGNER = (f"(?:{'|'.join(names)})" for names in (TOWERS, PROJECTORS))  # swift/model/model_arch.py
#: Modules as transformers names them, by the names of ms-swift and of Megatron's model.
_NAMES = {"all-embedding": "embed_tokens", "word_embeddings": "embed_tokens", "output_layer": "lm_head"}


@dataclass(frozen=True)
class SwiftModel:
    """The model that a configuration names, and its config; that is empty where the model is not known here."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)

    def get(self, *names: str) -> Any:
        """The first of some fields that its config has, or that of its language model."""
        parts = self.config, self.config.get("text_config") or {}
        return next((part[name] for part in parts for name in names if part.get(name) is not None), None)

    @property
    def language(self) -> str:
        """What the language model is called; of one that speaks, of which the part that thinks trains, ``model``."""
        return "model" if "thinker" in str(self.config.get("model_type")) else "language_model"

    @property
    def has_vision(self) -> bool:
        return any(name in self.config for name in ("vision_config", "audio_config", "thinker_config"))


class Trained(NamedTuple):
    """What of a model trains: adapters, or parameters by patterns of their names."""

    adapter: Adapter | None = None
    trained: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()


def read_model(options: Options, launch: JobLaunch) -> SwiftModel:
    """The model that is named. Raises JobError where none is."""
    name = options.needed("model", "ms-swift needs it", means="model")
    found, pixels = SwiftModel(name, find_config(name, launch.files)), read_pixels(options, launch)
    if found.has_vision and pixels is None:
        options.note("model", "assumed", "rows of text: passes of its vision and audio towers are left out, their "
                     "weights are there; MAX_PIXELS says that there are pictures")
    return found


def read_pixels(options: Options, launch: JobLaunch) -> int | None:
    """Pixels of a picture, by the option or by the variable of qwen_vl_utils; None where neither is given."""
    said = options.number("max_pixels", least=1)
    variable = launch.variables.get("MAX_PIXELS", "")
    return said if said is not None or not variable.isdecimal() else int(variable)


def read_length(options: Options, model: SwiftModel, kind: str | None) -> int:
    """Tokens of a row: base_args.py, what the model can take where nothing is said, but of text to be learnt (``kind``
    None: of `swift sft`) no more than its data sets' longest row has; rows are packed up to it.
    """
    own = model.get("seq_length", "max_position_embeddings", "n_positions", "model_max_length")
    length = options.number("max_length", least=1, means="most tokens of a sequence")
    packs = options.switch("packing", "rows are packed up to their most tokens")
    options.switch("padding_free", "a pass is one row, without padding")
    packed = options.number("packing_length", least=1)
    if packs and packed is not None:
        return packed
    if length is None:
        longest = None if packs or model.has_vision or kind is not None else _find_longest(options)
        if longest is not None and longest < (own or longest + 1):
            options.note("max_length", "assumed", f"every row has {longest:,} tokens, as the longest of its data sets "
                         "(ms-swift's own table); what rows of differing lengths add tells --lengths")
            return longest
        length = own or _UNKNOWN_LENGTH
        why = "all that the model can take, as ms-swift has it" if own else "what the model can take is not known"
        options.note("max_length", "assumed", f"rows of {length:,} tokens: {why}; give max_length for shorter ones")
    elif not packs:
        options.note("max_length", "assumed", f"every row has {length:,} tokens, and all are trained on: what the data "
                     "set has is not known")
    return int(length)


def _find_longest(options: Options) -> int | None:
    """Tokens of the longest row of all data sets that are named, as ms-swift's own table has them by the tokenizer of
    Qwen2.5; None where it tells of one nothing.
    """
    said = options.get("dataset")
    names = [re.sub(r"^(?:HF|MS)::|[#:].*$", "", str(word)) for word in (said if isinstance(said, list) else [said])]
    table = json.loads(Path(__file__).parent.with_name("longest_rows.json").read_text("utf-8"))
    found: list[int | None] = [table["longest"].get(name) for name in names]
    return None if None in found else max(length for length in found if length is not None)


def read_dtype(options: Options, model: SwiftModel) -> str:
    """The dtype of weights: model_args.py, that of the model's config where nothing is said."""
    said = options.text("torch_dtype", choices=_DTYPES)
    if said is not None:
        return _DTYPES[said]
    own = str(model.get("torch_dtype", "dtype") or "bfloat16")
    found = own if own in _DTYPES else "bfloat16"
    options.text("torch_dtype", found, means="weights: as the model's config has them")
    return _DTYPES[found]


def read_quantize(options: Options, model: SwiftModel) -> str | None:
    """How frozen weights are held: quant_args.py, and the name of a model whose weights are published so."""
    method = options.text("quant_method", choices=("bnb", "hqq", "eetq", "quanto", "fp8", "awq", "gptq", "gptq_v2"),
                          means="frozen weights in few bits")
    bits = options.text("quant_bits", choices=("1", "2", "3", "4", "8", "float8"))
    if method in ("bnb", "hqq", "eetq", "quanto"):
        if bits is None:
            raise options.fail("quant_bits", f"is not there, and quant_method {method} needs it")
        if method == "bnb" and bits not in ("4", "8"):
            raise options.fail("quant_bits", "bnb has 4 and 8 bits")
        found = "int8" if bits in ("8", "float8") else "nf4"
        if method != "bnb" or bits == "8":
            options.assume("quant_method", f"{method} of {bits} bits: as {found} of bitsandbytes")
        return found
    if method == "fp8":
        options.assume("quant_method", "weights of 8 bits, as int8 of bitsandbytes")
        return "int8"
    if bits is not None:
        options.note("quant_bits", "no effect", "without quant_method ms-swift quantizes nothing")
    return read_published_format(options, "model", "quant_method")


# What trains: tuner_args.py and pipelines/train/tuner.py.

_LIKE_LORA = {"longlora": "attention over whole rows, as without its shifted groups",
              "adalora": "LoRA of rank adalora_init_r, which it begins with"}
_OTHERS = ("llamapro", "adapter", "vera", "boft", "fourierft", "reft", "bone", "ia3", "dummy")


def read_trained(options: Options, model: SwiftModel, usual: str = "lora") -> Trained:
    """What trains by ``tuner_type``, which was ``train_type`` in ms-swift 3."""
    name = "tuner_type" if options.get("tuner_type") is not None or options.get("train_type") is None else "train_type"
    known = ("full", "lora", "lora_llm", *_LIKE_LORA, *_OTHERS)
    choices = () if options.get("external_plugins") is not None else known
    kind = options.text(name, usual, choices=choices, means="what is trained") or usual
    rank = options.count("lora_rank", 8, means="rank of adapters" if kind != "full" else "")
    dropout = options.fraction("lora_dropout", 0.05)
    dtype = options.text("lora_dtype", choices=_DTYPES)
    freezes = _read_freezes(options, model) if kind != "lora_llm" else _Freezes(llm=False, vit=True, aligner=True)
    targets, saved = _read_targets(options, model, freezes, kind), _read_saved(options)
    if options.text("tuner_backend", "peft", choices=("peft", "unsloth")) == "unsloth":
        options.note("tuner_backend", "not modelled", "the kernels and checkpoints of unsloth are left out")
    frozen = _read_frozen(options, model, freezes)
    if kind == "full":
        return frozen
    if kind == "adalora":
        rank = options.count("adalora_init_r", 12, means="rank of adapters")
    if kind in _LIKE_LORA:
        options.assume(name, f"{kind}: {_LIKE_LORA[kind]}")
    elif kind not in ("lora", "lora_llm"):
        options.note(name, "not modelled", f"{kind}: taken as LoRA of rank {rank}")
    # swift/tuner_plugin/lora_llm.py: adapters in the language model, all of what sees
    whole = (r".*lora_[AB]\.", *(rf"(?:.*\.)?{part}\." for part in (_VISION, _ALIGNER))) if kind == "lora_llm" else ()
    return Trained(Adapter(r=rank, targets=targets, dropout=dropout, saved=saved,
                           dtype=None if dtype is None else _DTYPES[dtype]), whole)


class _Freezes(NamedTuple):
    """Which parts of a model that sees do not train."""

    llm: bool
    vit: bool
    aligner: bool


def _read_freezes(options: Options, model: SwiftModel) -> _Freezes:
    sees = model.has_vision
    found = _Freezes(options.flag("freeze_llm", means="the language model does not train" if sees else ""),
                     options.flag("freeze_vit", True, means="the vision tower does not train" if sees else ""),
                     options.flag("freeze_aligner", True, means="what joins the two does not train" if sees else ""))
    if sees and all(found):
        raise options.fail("freeze_llm", "freeze_vit and freeze_aligner are true too; nothing is left to train")
    return found


def _read_targets(options: Options, model: SwiftModel, freezes: _Freezes, kind: str) -> tuple[str, ...]:
    """The layers that get adapters: ``all-linear`` leaves out the head, and frozen parts of a model that sees."""
    words = options.words("target_modules", ["all-linear"], means="" if kind == "full" else "layers with adapters")
    regex = options.text("target_regex")
    if regex is not None:
        return (f"re:{regex}",)
    parts = _list_parts(model, freezes) if model.has_vision else []
    more = [word for word in words if word not in ("all-linear", "all-embedding", "all-router")]
    if "all-embedding" in words or any("embed" in word for word in more):
        options.note("target_modules", "assumed", "the embedding has no adapter, whose rows would be few")
    if "all-linear" not in words:
        return tuple(more)
    more = [word for word in more if "embed" not in word]
    if not parts:
        return (r"re:(?!.*(?:embed|wte)).*",) if more else ()
    return (f"re:{'|'.join(parts)}", *more)


def _list_parts(model: SwiftModel, freezes: _Freezes) -> list[str]:
    """Patterns of layers of the parts of a model that sees which are not frozen."""
    parts = [] if freezes.llm else [rf"(?:.*\.)?{model.language}\..+"]
    if not freezes.vit:
        parts.append(rf"(?:.*\.)?{_VISION}\.{f'(?!(?:.*[.])?{_ALIGNER}[.])' if freezes.aligner else ''}.+")
    if not freezes.aligner:
        parts.append(rf"(?:.*\.)?{_ALIGNER}(?:\..+)?")
    return parts


def _read_saved(options: Options) -> tuple[str, ...]:
    found = options.words("modules_to_save")
    if "all-norm" in found:
        options.note("modules_to_save", "assumed", "norms, which have few parameters, do not train")
    return tuple(_NAMES.get(name, name) for name in found if name != "all-norm")


def _read_frozen(options: Options, model: SwiftModel, freezes: _Freezes) -> Trained:
    """What trains of all parameters: names begin as ``freeze_parameters`` do, or are of frozen parts; those of
    ``trainable_parameters`` train none the less.
    """
    frozen = [re.escape(name) for name in options.words("freeze_parameters")]
    trained = [re.escape(name) for name in options.words("trainable_parameters")]
    frozen += [f".*(?:{regex})" for regex in [options.text("freeze_parameters_regex")] if regex]
    trained += [f".*(?:{regex})" for regex in [options.text("trainable_parameters_regex")] if regex]
    ratio = options.fraction("freeze_parameters_ratio", 0.0)
    if 0 < ratio < 1:
        options.note("freeze_parameters_ratio", "not modelled", "all parameters are taken to train")
    elif ratio >= 1:
        return Trained(trained=tuple(trained))
    if model.has_vision:
        parts = (f"(?:{model.language}|lm_head)", _VISION, _ALIGNER)
        frozen += [rf"(?:.*\.)?{part}\." for part, stays in zip(parts, freezes) if stays]
        trained += [] if freezes.aligner else [rf"(?:.*\.)?{_ALIGNER}\."]
    if not frozen:
        return Trained()
    unless = f"(?!{'|'.join(trained)})" if trained else ""
    return Trained(frozen=(f"^{unless}(?:{'|'.join(frozen)})",))


# What it trains for.

_SCORES: dict[str, Task] = {"seq_cls": "classify", "embedding": "reward", "reranker": "reward",
                            "generative_reranker": "reward"}
TASKS: dict[str, Task] = {"dpo": "dpo", "orpo": "orpo", "simpo": "simpo", "cpo": "simpo", "kto": "kto", "rm": "reward",
                          "ppo": "policy", "grpo": "policy", "gkd": "distill"}


def read_task(options: Options, kind: str | None) -> Task:
    """The task of ``task_type``, or of a kind of `swift rlhf`; ``kind`` None: of `swift sft`."""
    said = options.text("task_type", "causal_lm", choices=("causal_lm", *_SCORES))
    if kind is not None:
        if kind == "cpo":
            options.assume("rlhf_type", "cpo: as simpo, which has no reference either")
        return TASKS[kind]
    if said in ("embedding", "reranker", "generative_reranker"):
        options.assume("task_type", f"{said}: pairs of rows, each of which gives one number; further negatives of a "
                       "sample are not known")
    return _SCORES.get(said, "sft")


def read_kind(options: Options, launch: JobLaunch, kinds: Iterable[str]) -> str | None:
    """What `rlhf` trains for; None of a file without that option, and of other commands."""
    is_rlhf = "rlhf" in " ".join(launch.command) if launch.command else options.get("rlhf_type") is not None
    return options.text("rlhf_type", "dpo", choices=kinds, means="what is trained for") if is_rlhf else None


def reference_of(task: Task, kind: str | None, adapter: Adapter | None, beta: Any) -> Any:
    """With what answers are compared: rlhf_args.py; GRPO without a divergence has none."""
    if task not in ("dpo", "kto", "policy") or (kind == "grpo" and str(beta) in ("0", "0.0")):
        return "none"
    return "copy" if adapter is None else "adapter"


def read_teacher(options: Options, model: SwiftModel) -> tuple[Any, str | None]:
    """With what a model is compared that is distilled, and the teacher's name: rlhf_trainers/gkd_trainer.py. A server
    gives the likeliest tokens alone; without a teacher it is the model itself, without its adapter.
    """
    name = options.text("teacher_model", means="teacher")
    apart = next((each for each in ("teacher_model_server", "teacher") if options.get(each) is not None), None)
    if apart is not None:
        options.assume(apart, "devices of its own, which answer while the model's own pass runs")
        return "none", None
    return ("adapter", None) if name is None else ("copy", None if name == model.name else name)
