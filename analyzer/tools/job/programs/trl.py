"""TRL: `trl sft` and its like with options or a YAML, and its scripts (`trl/scripts/dpo.py`)."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..document import Document
from ..options import Options
from ..plan import Adapter, Checkpoints, Task, TrainingPlan
from ..program import JobLaunch, JobProgram, name_of, set_batch, set_option
from .accelerate import read_accelerate
from .rollout import add_rollout
from .trainer import (
    read_attention,
    read_batch,
    read_checkpoints,
    read_common,
    read_optimizer,
    read_precision,
    read_published_format,
    read_sharding,
)

# TRL 1.16, trl/trainer/*_config.py and trl/scripts/

_TASKS: dict[str, Task] = {"sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "reward", "grpo": "policy",
                           "rloo": "policy"}
_SIGNS = {"num_generations": "grpo", "max_completion_length": "grpo", "desirable_weight": "kto",
          "center_rewards_coefficient": "reward", "precompute_ref_log_probs": "dpo", "max_prompt_length": "dpo",
          "beta": "dpo"}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "auto": "bf16"}
#: Tokens of a part of the loss. The head's kernel computes tiles of 4,096 tokens and 32,768 words in 16 bits
#: (kernels/chunked_logprob.py); parts of so many tokens with all words, and their copies in float32, need as much.
_TOKENS_OF_PART = 256
#: The configurations of accelerate that TRL brings (accelerate_configs/), each of eight devices but the first.
_LAUNCHES: dict[str, dict[str, Any]] = {
    "single_gpu": {"num_processes": 1}, "multi_gpu": {"distributed_type": "MULTI_GPU", "num_processes": 8},
    **{f"fsdp{version}": {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_version": version}}
       for version in (1, 2)},
    **{f"zero{stage}": {"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": {"zero_stage": stage}}
       for stage in (1, 2, 3)}}


def read(options: Options, launch: JobLaunch) -> TrainingPlan:
    """The plan of a command or a YAML. Raises JobError for what TRL's own checks refuse."""
    model = options.needed("model_name_or_path", "TRL needs it", means="model")
    said, task = _read_task(options, launch)
    launched = _read_launch(options, launch)
    launch.ranks = launched.ranks
    batch, accumulate = read_batch(options)
    length = _read_length(options, said)
    quantize = _read_quantization(options)
    adapter = _read_adapter(options, task, quantize)
    if quantize is not None and adapter is None:
        raise options.fail("load_in_4bit" if quantize == "nf4" else "load_in_8bit",
                           "quantized weights do not train; give use_peft too")
    sequences = batch * (1 if task in ("sft", "policy") else 2)
    plan = TrainingPlan(
        model=model, task=task, reference=_read_reference(options, said, adapter), micro_batch=batch,
        accumulate=accumulate, length=length, dtype=_read_dtype(options),
        autocast=read_precision(options, launch, bf16=True), quantize=quantize, adapter=adapter,
        attention=read_attention(options), checkpoints=_read_checkpoints(options, launched),
        loss_chunks=None if task == "reward" else min(64, -(-sequences * length // _TOKENS_OF_PART)),
        optimizer=read_optimizer(options), sharding=read_sharding(options, launched),
        assumptions=() if task == "reward" else (
            "the loss is computed in parts with the head, as TRL's kernel does, each part run again in backward",),
        **read_common(options, launched))
    plan = add_rollout(options, plan, "num_generations", share=0.3)
    options.finish("trainer", "trl")
    return plan


def _read_task(options: Options, launch: JobLaunch) -> tuple[str, Task]:
    """Of the command; of a file alone by options that one task has."""
    words = [name_of(word).removesuffix(".py") for word in launch.command]
    said = next((word for word in reversed(words) if word in _TASKS), None)
    if said is None:
        said = next((task for sign, task in _SIGNS.items() if options.get(sign) is not None), "sft")
        options.note("model_name_or_path", "assumed", f"trained with `trl {said}`: a file does not say it; give the "
                     f"command: analyzer job -- trl {said} --config FILE")
    return said, _TASKS[said]


def _read_launch(options: Options, launch: JobLaunch) -> JobLaunch:
    """What `trl` hands to `accelerate launch`: cli/accelerate_config.py."""
    said = options.text("accelerate_config")
    processes = options.number("num_processes", least=1)
    if said is None and processes is None:
        return launch
    documents = []
    if said in _LAUNCHES:
        documents.append(Document(f"trl/accelerate_configs/{said}.yaml", "", _LAUNCHES[said]))
    elif said is not None:
        if (path := launch.files.find(said)) is None:
            raise options.fail("accelerate_config", f"no such file, and none of {', '.join(_LAUNCHES)}, which TRL has")
        documents.append(launch.files.document(path))
    documents.append(Document(options.layers[-1][0].name, "",
                              {} if processes is None else {"num_processes": processes}))
    return read_accelerate(Options.of(*documents, readings=launch.readings), launch)


def _read_length(options: Options, said: str) -> int:
    if said in ("grpo", "rloo"):
        answer = options.count("max_completion_length", 512, means="tokens of an answer")
        prompt = options.number("max_prompt_length")
        if prompt is None:
            options.note("max_completion_length", "assumed", f"prompts of as many tokens as answers, {answer:,}")
        return answer + (answer if prompt is None else prompt)
    name = "max_seq_length" if options.get("max_length") is None and options.get("max_seq_length") else "max_length"
    if options.get("max_length") is None and "max_length" in options.names():
        options.note("max_length", "assumed", "no limit: rows of 1,024 tokens, as without it")
        return 1024
    length = options.count(name, 1024, means="tokens of a sequence")
    if name == "max_seq_length":
        options.assume(name, "its name before TRL 0.20; max_length is meant")
    packs = options.flag("packing", means="rows are filled up to max_length" if said == "sft" else "")
    if not packs:
        options.note(name, "assumed", f"every row has {length:,} tokens: what the data set has is not known")
    return length


def _read_quantization(options: Options) -> str | None:
    four, eight = options.flag("load_in_4bit"), options.flag("load_in_8bit")
    if four and eight:
        raise options.fail("load_in_8bit", "load_in_4bit is given too; TRL refuses both")  # model_config.py
    return "nf4" if four else "int8" if eight else read_published_format(options, "model_name_or_path")


def _read_adapter(options: Options, task: Task, quantize: str | None) -> Adapter | None:
    uses = options.flag("use_peft", means="adapters are trained, not the model")
    rank, dropout = options.count("lora_r", 16), options.fraction("lora_dropout", 0.05)
    targets, saved = options.words("lora_target_modules"), options.words("lora_modules_to_save")
    if not uses:
        return None
    if not targets:
        options.assume("lora_target_modules", "projections of queries and values, as peft chooses for most families")
        targets = ["q_proj", "v_proj"]
    dropout = 0.0 if task in ("dpo", "kto", "reward") and options.get("disable_dropout") is not False else dropout
    return Adapter(r=rank, targets=() if targets == ["all-linear"] else tuple(targets), dropout=dropout,
                   dtype=None if quantize is None else "bf16", saved=tuple(saved))


def _read_dtype(options: Options) -> str:
    """Of the weights: float32, unless it is given (trainer/model_config.py)."""
    name = "torch_dtype" if options.get("torch_dtype") is not None and options.get("dtype") is None else "dtype"
    said = options.text(name, "float32", choices=_DTYPES, means="dtype of the weights")
    return _DTYPES[said or "float32"]


def _read_checkpoints(options: Options, launch: JobLaunch) -> Checkpoints:
    recomputes = launch.recomputes or read_checkpoints(options, default=True) == "blocks"
    if options.flag("activation_offloading"):
        if recomputes:
            return "offloaded"
        options.note("activation_offloading", "not modelled", "what is saved for backward is taken to stay on the "
                     "device, for blocks are not run again")
    return "blocks" if recomputes else "none"


def _read_reference(options: Options, said: str, adapter: Adapter | None) -> Any:
    if options.flag("precompute_ref_log_probs") or said in ("sft", "reward"):
        return "none"
    beta = options.fraction("beta", {"grpo": 0.0, "rloo": 0.05}.get(said, 0.1))
    if said in ("grpo", "rloo") and not beta:
        return "none"
    return "copy" if adapter is None else "adapter"


def _is_file(data: Any) -> bool:
    return "model_name_or_path" in data and bool(
        {"dataset_name", "datasets", "dataset_mixer", "dataset_mixture", "use_peft", "lora_r", "max_length",
         "max_seq_length", "per_device_train_batch_size", "num_generations"} & set(data))


def _is_command(words: Sequence[str]) -> bool:
    """One of its scripts: ``trl/scripts/sft.py``, ``examples/scripts/dpo.py``, or that name with its options."""
    folder, _, name = words[0].rpartition("/")
    return name.removesuffix(".py") in _TASKS and name.endswith(".py") and "--model_name_or_path" in words and (
        folder.endswith("scripts") or bool({"--dataset_name", "--use_peft"} & set(words)))


TRL = JobProgram(
    name="TRL", version="1.16", source="huggingface/trl trl/trainer/*_config.py", read=read, is_file=_is_file,
    is_command=_is_command, commands=tuple(f"trl {task}" for task in _TASKS),
    changes={"batch": set_batch("per_device_train_batch_size", "gradient_accumulation_steps"),
             "checkpoints": set_option("gradient_checkpointing", True),
             "optimizer": set_option("optim", "adamw_bnb_8bit"),
             "quantize": set_option("load_in_4bit", True), "length": set_option("max_length")})
