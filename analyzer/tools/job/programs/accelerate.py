"""The configuration file of ``accelerate launch``, and the options of its command that override it."""
from __future__ import annotations

from dataclasses import replace

from ..document import Document
from ..options import Options
from ..plan import Sharding
from ..program import JobLaunch, read_beside
from .deepspeed import read_deepspeed
from .trainer import read_fsdp_config

# accelerate 1.15, commands/config/config_args.py and commands/launch.py


#: utils/dataclasses.py, `DistributedType`, by which commands/config writes a file.
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA",
          "MULTI_HPU", "MULTI_NEURON", "DEEPSPEED", "FSDP", "TP", "XLA", "MEGATRON_LM")


def read_accelerate(options: Options, launch: JobLaunch) -> JobLaunch:
    """What a launch is by a file of accelerate, the options of its command over it."""
    kind = options.text("distributed_type", "", choices=_KINDS).upper()
    ranks = options.number("num_processes", launch.ranks, least=1, means="ranks of all hosts")
    if kind == "NO" and not any(options.get(name) for name in ("multi_gpu", "use_fsdp", "use_deepspeed")):
        options.note("num_processes", "no effect", "")
        ranks = 1  # commands/launch.py, `simple_launcher`: one process, whatever the number that is asked for
    hosts = options.number("num_machines", launch.hosts, least=1)
    precision = options.text("mixed_precision", choices=("no", "fp16", "bf16", "fp8"))
    fsdp, deepspeed = options.part("fsdp_config"), options.part("deepspeed_config")
    sharding: Sharding | None = None
    recomputes = False
    if kind == "FSDP" or options.get("use_fsdp") or (not kind and fsdp is not None and fsdp.names()):
        settings = fsdp if fsdp is not None else _take(options, "fsdp_")
        sharding, recomputes = read_fsdp_config(settings)
    elif kind == "DEEPSPEED" or options.get("use_deepspeed") or (
            not kind and deepspeed is not None and deepspeed.names()):
        sharding = _read_deepspeed(deepspeed if deepspeed is not None else options, launch)
    elif ranks is not None and ranks > 1:
        sharding = Sharding(kind="ddp")
    if precision == "fp8":
        options.note("mixed_precision", "not modelled", "passes in eight bits are taken as in bfloat16")
        precision = "bf16"
    if (dynamo := options.part("dynamo_config")) is not None:
        if str(dynamo.get("dynamo_backend") or "NO").upper() != "NO":
            dynamo.note("dynamo_backend", "not modelled", "passes are taken as they run uncompiled")
        dynamo.rest("dynamo_*")
    options.finish("accelerate")
    return replace(launch, ranks=ranks, hosts=hosts, sharding=sharding, recomputes=recomputes,
                   mixed_precision=None if precision is None else precision.lower())


def _take(options: Options, beginning: str) -> Options:
    """The options of a command that begin so, as if they were a part."""
    layers = [(document, {name: value for name, value in values.items() if name.startswith(beginning)})
              for document, values in options.layers]
    return Options(layers, options.keys, options.readings)


def _read_deepspeed(options: Options, launch: JobLaunch) -> Sharding:
    """By a file that it names, or by the few settings of accelerate's own."""
    document = read_beside(options, "deepspeed_config_file", launch)
    if document is None:
        stage = options.number("zero_stage", 2, means="what ranks share: 1 states, 2 gradients, 3 weights")
        zero: dict[str, object] = {"stage": stage}
        for name in ("optimizer", "param"):
            device = options.text(f"offload_{name}_device", "none", choices=("none", "cpu", "nvme"))
            if device != "none":
                zero[f"offload_{name}"] = {"device": device}
        document = Document(options.layers[-1][0].name, "", {
            "zero_optimization": zero, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto",
            "gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": "auto"})
    found = read_deepspeed(document, options, launch)
    options.rest("gradient_accumulation_steps gradient_clipping zero3_* deepspeed_* offload_*")
    return found
