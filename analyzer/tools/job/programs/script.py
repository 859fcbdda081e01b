"""A script of one's own that takes transformers' `TrainingArguments` on its command line."""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..options import Options
from ..plan import Adapter, Task, TrainingPlan
from ..program import JobLaunch, JobProgram, name_of, set_option
from .trainer import (
    CHANGES,
    FUSED_LOSS,
    read_attention,
    read_batch,
    read_checkpoints,
    read_common,
    read_optimizer,
    read_precision,
    read_published_format,
    read_sharding,
    reference_of,
)

# transformers 5.17, training_args.py; names of lengths, models and adapters as its examples, FastChat, LLaVA, the QLoRA
# repository, axolotl's forerunners and Open-Instruct have them.

_MODELS = ("model_name_or_path", "model", "base_model", "model_name", "pretrained_model_name_or_path", "model_id",
           "model_path", "base_model_name_or_path", "llm_name_or_path")
_LENGTHS = ("block_size", "max_seq_length", "max_length", "model_max_length", "max_seq_len", "cutoff_len", "seq_length",
            "sequence_length", "max_source_length", "seq_len")
_RANKS = ("lora_r", "lora_rank", "lora_dim", "peft_lora_r")
_USES = ("use_peft", "use_lora", "use_peft_lora", "lora", "lora_enable", "use_qlora", "q_lora", "lora_training")
_DROPOUTS = ("lora_dropout", "peft_lora_dropout")
_TARGETS = ("lora_target_modules", "target_modules", "lora_target", "lora_modules")
_DTYPES = {"auto": "bf16", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "float32": "fp32",
           "fp32": "fp32"}
#: What scripts are named for, where it is another task than to learn next tokens.
_TASKS: tuple[tuple[str, Task], ...] = (
    (r"dpo", "dpo"), (r"orpo", "orpo"), (r"simpo", "simpo"), (r"kto", "kto"), (r"reward|(^|_)rm(_|$)", "reward"),
    (r"grpo|ppo|rloo|rlhf", "policy"), (r"glue|classif", "classify"))
#: Of `run_clm.py`, which takes what the tokenizer can and at most that.
_LENGTH = 1024


def read(options: Options, launch: JobLaunch) -> TrainingPlan:
    """The plan of a command; what the script itself makes of its other options is not known. Raises JobError."""
    name = _find(options, _MODELS)
    model = options.needed(name, "the script's model is not known without it", means="model")
    batch, accumulate = read_batch(options)
    task = _read_task(options, launch)
    quantize = _read_quantization(options, name)
    adapter = _read_adapter(options, quantize)
    dtype, said = _read_dtype(options)
    plan = TrainingPlan(
        model=model, task=task, reference=reference_of(task, adapter),
        classes=options.count("num_labels", 2), micro_batch=batch, accumulate=accumulate,
        length=_read_length(options), dtype=dtype, autocast=read_precision(options, launch),
        quantize=quantize, adapter=adapter, attention=read_attention(options),
        checkpoints="blocks" if launch.recomputes else read_checkpoints(options),
        loss_chunks=_read_loss(options), optimizer=read_optimizer(options),
        sharding=read_sharding(options, launch), assumptions=(
            "the script trains a model of transformers with its Trainer, as its options suggest; what else it does is "
            "not read: `analyzer dryrun` runs a script itself", *said), **read_common(options, launch))
    options.finish("trainer", "script")
    return plan


def _find(options: Options, names: Sequence[str]) -> str:
    """The first of several names of one option that is given, else the first of all."""
    return next((name for name in names if options.get(name) is not None), names[0])


def _read_task(options: Options, launch: JobLaunch) -> Task:
    script = name_of(launch.command[0]).removesuffix(".py").lower() if launch.command else ""
    task = next((task for pattern, task in _TASKS if re.search(pattern, script)), None)
    if task is None:
        return "sft"
    name = _find(options, _MODELS)
    what = {"policy": "the update of answers that are there: the rollout is left out", "classify": "a class of each "
            "sequence"}.get(task, f"a step of {task.upper() if task != 'reward' else 'a reward model'}")
    options.note(name, "not modelled" if task == "policy" else "assumed", f"the script is named for it: {what}")
    return task


def _read_length(options: Options) -> int:
    name = _find(options, _LENGTHS)
    given = options.get(name) is not None
    length = options.count(name, _LENGTH, means="tokens of a sequence")
    if name == "max_source_length":
        options.note(name, "not modelled", "a model that reads and writes is taken as one that continues its text")
    elif not given:
        options.note(name, "assumed", f"no length is given: rows of {_LENGTH:,} tokens, as run_clm.py has them")
    elif name != "block_size" and not options.flag("packing"):
        options.note(name, "assumed", f"every row has {length:,} tokens: what the data set has is not known")
    options.flag("packing")
    return length


def _read_quantization(options: Options, name: str) -> str | None:
    bits = options.number(_find(options, ("bits", "quantization_bit")))
    four = options.flag("load_in_4bit") or options.flag("use_4bit_quantization")
    eight = options.flag("load_in_8bit") or options.flag("use_8bit_quantization")
    four = four or options.flag("use_4bit") or options.get("use_qlora") in (True, "True", "true")
    four = four or options.get("q_lora") in (True, "True", "true")
    held = read_published_format(options, name)
    return "nf4" if four or bits == 4 else "int8" if eight or bits == 8 else held


def _read_adapter(options: Options, quantize: str | None) -> Adapter | None:
    """Where an option says so, a rank is given, or weights are quantized, which do not train themselves."""
    uses = [options.flag(name) for name in _USES if options.get(name) is not None]
    rank, dropout = _find(options, _RANKS), _find(options, _DROPOUTS)
    targets, given = _find(options, _TARGETS), options.get(rank) is not None
    count, share = options.count(rank, 8), options.fraction(dropout, 0.0)
    names = options.words(targets)
    if not (any(uses) or (given and not uses) or quantize is not None):
        return None
    if not given:
        options.assume(rank, "adapters of rank 8, as peft has them without one")
    if not names:
        options.assume(targets, "adapters beside all linear layers but the head; a script may choose fewer")
    return Adapter(r=count, dropout=share, targets=() if names in ([], ["all-linear"], ["all"]) else tuple(names))


def _read_dtype(options: Options) -> tuple[str, list[str]]:
    """The dtype in which the weights are loaded, and what is assumed of it."""
    name = _find(options, ("torch_dtype", "dtype", "model_dtype"))
    said = options.text(name, choices=_DTYPES, means="dtype of the weights")
    if said is not None:
        return _DTYPES[said], []
    return "bf16", ["the weights are loaded in the checkpoint's dtype, bfloat16, as transformers 5 does; before 5 they "
                    "were in float32, where the script did not say otherwise"]


def _read_loss(options: Options) -> int | None:
    name = _find(options, ("use_liger_kernel", "use_liger"))
    if not options.flag(name):
        return None
    options.assume(name, "the loss in parts, with the head; its other kernels are left out")
    return FUSED_LOSS


_OWN = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "gradient_checkpointing",
        "lr_scheduler_type", "bf16", "fp16", "deepspeed", "fsdp", "save_strategy", "logging_steps", "save_steps")


def _is_command(words: Sequence[str]) -> bool:
    """A script, or a module, with a model and the size of a batch, or several of the trainer's other options."""
    names = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in words[1:] if word.startswith("--")}
    is_script = words[0].endswith(".py") or re.fullmatch(r"\w+(\.\w+)+", words[0]) is not None
    own = names & set(_OWN)
    return is_script and bool(names & set(_MODELS)) and ("per_device_train_batch_size" in own or len(own) > 2)


def _change_length(options: Options, plan: TrainingPlan, wanted: Any) -> Any:
    return set_option(_find(options, _LENGTHS))(options, plan, wanted)


SCRIPT = JobProgram(
    name="TrainingArguments", version="transformers 5.17", source="huggingface/transformers "
    "src/transformers/training_args.py", read=read, is_command=_is_command, config="",
    changes={**CHANGES, "length": _change_length})
