"""The options of all commands, each written once; `analyzer.commands` says which command takes which."""
from __future__ import annotations

import argparse
from pathlib import Path

from analyzer.units import read_amount, read_seconds

from .option import Option, parse_depth, read_numbers, read_size, read_wait, split_words
from .option import file_option as _file
from .option import number_option as _number
from .option import switch_option as _switch

_AUTOCAST = ("bfloat16", "float16", "bf16", "fp16")
_FORMATS = "analyzer.report.text_table:FORMATS"

_OF_A_STEP = (
    Option("target", "the model; see `analyzer profile --help`", metavar="TARGET"),
    Option("--input", "an input: SHAPE (float32), DTYPE:SHAPE, or NAME=DTYPE:SHAPE, e.g. 8x3x224x224 or "
           "input_ids=int64:8x512; one --input for each; default: what the model is usually called with",
           action="append", default=[], metavar="SPEC"),
    Option("--batch-size --bs", argparse.SUPPRESS, name="batch-size", type=int),  # many tools have it
    Option("--mode", "train: forward, loss, backward, optimizer (default); infer: forward", choices=("train", "infer"),
           default="train"),
    Option("--mode", "train: forward, loss, backward, optimizer (default); infer: forward; inference_mode: under it",
           name="mode of profile", choices=("train", "infer", "inference_mode"), default="train", metavar="MODE"),
    Option("--autocast", "run forward under torch.autocast, in bf16 or fp16", choices=_AUTOCAST, metavar="DTYPE"),
    Option("--device", "device to predict for (default h200), e.g. h100_sxm,power=500; see `analyzer devices`",
           default="h200"),
    Option("--dtype", "dtype of floating parameters and inputs, e.g. bf16 (default: as the model is built)",
           metavar="DTYPE"),
    Option("--quantize", "hold the weights of linear layers, except the output head's, in "
           "{analyzer.recipe.quantize:LAYERS}", choices="analyzer.recipe.quantize:LAYERS", metavar="FORMAT"),
    Option("--lora", "train adapters; targets=q_proj+v_proj, dropout=0.05, dtype=bf16 (default all-linear, 0, fp32)",
           metavar="r=N[,...]"),
    Option("--attention", "attention of a model of transformers: sdpa, eager, ...", metavar="NAME"),
    _number("--loss-chunks", "compute a language model's loss in N parts of its tokens"),
    _switch("--checkpointing", "run each block again in the backward pass"),
    Option("--compile", "profile under torch.compile, in a mode of {analyzer.recipe.recipe:COMPILE_MODES} "
           "(default {analyzer.recipe.recipe:COMPILED}; blocks: each repeated block by itself)", nargs="?",
           const="analyzer.recipe.recipe:COMPILED", choices="analyzer.recipe.recipe:COMPILE_MODES", metavar="MODE"),
    Option("--optimizer", "of {analyzer.recipe.optimizer:OPTIMIZERS}, or {analyzer.recipe.optimizer:FORM} "
           "(default: none, gradients only)", metavar="NAME"),
    _number("--accumulate", "micro-batches of a step, each as large as --input says", 1),
    Option("--convention", "how FLOPs are counted: own (default; every operator, both passes), deepspeed (forward "
           "alone)", choices=("own", "deepspeed"), default="own", metavar="NAME"),
    Option("--lengths", "samples of an epoch: {analyzer.tools.lengths.distribution:GRAMMAR}", metavar="LENGTHS"),
    Option("--batching", "{analyzer.tools.lengths.batching:GRAMMAR} (default random)", metavar="HOW"),
    Option("--padding", "longest (default), longest:8 for multiples of 8, max, none", metavar="HOW"),
    Option("others", argparse.SUPPRESS, nargs="*", default=(), metavar="TARGET"))

_OF_RANKS = (
    Option("--alloc-conf", "settings of the allocator as in PYTORCH_ALLOC_CONF, e.g. expandable_segments:True",
           metavar="CONF"),
    _number("--devices", "number of devices that the process has (default 1)", name="device count"),
    _number("--world", "run as one of N ranks: torch.distributed is there and moves no data"),
    _number("--rank", "the rank that runs (default 0; `dryrun` chooses some ranks)", metavar="R"),
    Option("--ranks", "the ranks that run, each in a process of its own", type=read_numbers, metavar="R,R"),
    _number("--devices-per-host", "number of ranks on a host (default: the devices of the cluster's hosts, else 8)"),
    Option("--cluster", "hosts and links, e.g. dgx_h100 or dgx_h100,fabric=25e9 (default: the usual ones of the "
           "device)", metavar="NAME"),
    Option("--deepspeed", "run the engine that DeepSpeed makes of the model by this JSON file; needs deepspeed",
           metavar="FILE"))

_REPORTS = "{analyzer.results.view:register_report}, or one that TARGET's file adds with register_report"

_OF_OUTPUT = (
    Option("--show", "reports, with commas between them (default screen, all of it): " + _REPORTS,
           default="screen", metavar="NAMES"),
    _file("--json", "also save the result, for `analyzer show`, `compare`, `check` and `view`"),
    _file("--html", "also write the result as one HTML page"),
    Option("--export", "a file for another tool; KIND: {analyzer.report.export.table_file:list_kinds}, or one "
           "that TARGET's file adds with register_exporter; else by its ending, of "
           "{analyzer.report.export.table_file:ENDINGS}", action="append", default=[], metavar="[KIND=]FILE"),
    Option("--format", "format of the table (default text)", choices=_FORMATS, default="text"))

_OF_REPORTS = (
    Option("--report", "reports to print, with commas between them (default screen, or cost if one of its options is "
           "given): {analyzer.results.view:register_report}, or FILE.py:NAME, which FILE.py registers with "
           "register_report", metavar="NAMES"),
    Option("--depth", "modules (and nodes by the module that holds them) down to this depth", type=parse_depth,
           metavar="N"),
    Option("--sort", "sort by this quantity, largest first, e.g. incremental_bytes or fwd_flops", metavar="COLUMN"),
    Option("--columns", "columns, separated by commas; for the tree, besides the usual ones: "
           "{analyzer.report.module_tree:CHOSEN}, costs also with _share for their share of the model's; for "
           "torchinfo: {analyzer.report.compat.torchinfo_format:TITLES}", type=split_words, metavar="NAMES"),
    _number("--module-depth", "depth down to which the largest modules are listed (default all)"),
    _number("--top-modules", "number of largest modules that are listed at each depth (default 1)"),
    Option("--no-detail", "leave out the tree of modules", dest="detailed", action="store_const", const=False),
    Option("--ignore-modules", "classes or paths of modules whose costs count as their parent's own", type=split_words,
           metavar="NAMES"),
    Option("--format", "format of the tables (default text); formats other than text name modules by their paths, and "
           "csv has all quantities, unrounded", name="format of reports", dest="fmt", choices=_FORMATS),
    Option("--raw", "plain numbers, in bytes and seconds", dest="as_string", action="store_const", const=False),
    _file("--output", "write the output to this file instead of printing it"),
    Option("--tokens", "how many tokens the run takes, e.g. 2e12 or 2T; batch times sequence of each step counts",
           type=read_amount, metavar="N"),
    Option("--samples", "how many samples the run takes, e.g. 1e9 or 1B; the batch of each step counts",
           type=read_amount, metavar="N"),
    _number("--gpus", "how many devices share the run, each copy of the model as fast as one alone (default 1)"),
    Option("--power", "watts of one device (default: predicted from its kernels, else its power limit)", type=float,
           metavar="WATTS"))

_OF_SAVED_PROFILES = (
    _file("file", "a profile saved with --json"),
    _file("file", "a profile saved with --json (default: the command that made BASELINE is run again)",
          name="checked file", nargs="?"),
    Option("--against", "a saved profile to compare it with", type=Path, metavar="BASELINE"),
    Option("--max", "{analyzer.report.check:GRAMMAR}; may be repeated", action="append", default=[], metavar="LIMIT",
           dest="limits"),
    _file("first", "a profile saved with --json"),
    _file("second", "another saved profile"),
    _file("others", "more saved profiles", name="more", nargs="*"),
    Option("--by", "what a row is (default: change for two profiles, model with --columns or for more profiles)",
           choices=("change", "model")),
    Option("--fail-if", "{analyzer.report.check:CONDITION_GRAMMAR}; may be repeated", action="append", default=[],
           metavar="CONDITION"),
    _file("--markdown", "also write what changed as Markdown that suits a comment on a pull request"),
    Option("--columns", "quantities, separated by commas (default: {analyzer.report.summary:DEFAULT_COLUMNS})",
           name="columns of compare", type=split_words, metavar="NAMES"),
    Option("--format", "format of the output (default text); markdown is that of --markdown, the others are one table "
           "of all changes, in which modules have their paths, and in csv unrounded numbers",
           name="format of compare", choices=_FORMATS, default="text"),
    _file("files", "a profile saved with --json", nargs="+"),
    Option("--html", "file to write the page to (default: in a new folder)", name="html of view", type=Path,
           metavar="PAGE"),
    _switch("--no-browser", "write the page without opening it"))

_OF_GENERATION = (
    _number("--prompt", "tokens of the prompt", 512),
    _number("--new-tokens", "tokens to generate", 128),
    _number("--batch", "sequences at once", 1, name="sequences"),
    _number("--samples", "how many passes after the first are run, 0 for all; the others are interpolated", 16,
            name="passes"),
    _number("--rows", "rows of the table, 0 for all", 20),
    Option("--cache", "dynamic: grows with each token (default); static: room for all tokens at once; paged: grows by "
           "pages (default with --max-sequences, --batches and --cache-dtype)",
           choices="analyzer.tools.generation.stored_cache:CACHES"),
    Option("--cache-dtype", "dtype of the cache, of {analyzer.tools.generation.run:CACHE_DTYPES} (default the model's)",
           choices="analyzer.tools.generation.run:CACHE_DTYPES", metavar="DTYPE"),
    _number("--block-size", "tokens of a page of the cache", "analyzer.tools.generation.stored_cache:BLOCK_SIZE"),
    _switch("--max-sequences", "find the largest number of sequences of --prompt and --new-tokens that fits"),
    Option("--memory-share", "share of the device's memory that a server may take (default the server's own), or "
           "--max-sequences (default 1), e.g. 0.9", type=float, metavar="F"),
    Option("--batches", "a row for each number of sequences: decode speed, memory", type=read_numbers,
           metavar="N,N,..."),
    _number("--prefill-chunk", "tokens that a server reads at once (default the server's own; without one "
            "{analyzer.tools.generation.serving:PREFILL_CHUNK})"),
    Option("--engine", "how a pass is launched: transformers (eager, kernel by kernel) or server (one CUDA graph; "
           "default with a paged cache or an option of a server)", choices=("transformers", "server")),
    Option("--server", "one of {analyzer.tools.serving.engine:ENGINES} (default vllm), with a version or without: "
           "sglang:0.5.6", metavar="NAME"),
    Option("--server-version", "version of --server whose defaults are taken, e.g. 0.11 (default the newest known)",
           metavar="VERSION"),
    _number("--receive-interval", "passes of decoding after which a server looks for new requests (default its own)"),
    _number("--stream-interval", "tokens that a stream sends at once (default the server's own)"),
    Option("--batch-wait", "PASSES:SHARE: prompts wait for others at most so many passes, until they fill this share "
           "of one, e.g. 20:0.9 (default the server's own)", type=read_wait, metavar="N:F"),
    _switch("--burst", "clients all begin at once and ask ten times each, as benchmarks of servers do"),
    Option("--concurrency", "number of requests in flight, or several numbers for a row each (default --batch)",
           type=read_numbers, metavar="N[,N...]"),
    Option("--rate", "requests a second, which come at random times; replaces --concurrency", type=float, metavar="R"),
    Option("--weights", "format of weights that a server holds, one of "
           "{analyzer.tools.serving.deployment:WEIGHT_FORMATS} (default as the model is published)",
           choices="analyzer.tools.serving.deployment:WEIGHT_FORMATS", metavar="FORMAT"),
    Option("--experts", "format of the weights of experts (default as --weights)",
           choices="analyzer.tools.serving.deployment:WEIGHT_FORMATS", metavar="FORMAT"),
    Option("--skew", "Zipf exponent of how unevenly experts are chosen (default 0)", type=float,
           default=0.0, metavar="S"),
    *(_number(f"--{name}", text, 1) for name, text in (
        ("tp", "ranks that split each layer"), ("pp", "stages of layers"), ("dp", "copies of attention and its cache"),
        ("ep", "ranks over which experts are spread"))),
    _number("--images", "pictures in each prompt of a server, whose tokens are added to --prompt"),
    Option("--image-size", "WxH: pixels of --images, or of a video's frames (default 1024x1024)", type=read_size,
           metavar="WxH"),
    _number("--video-frames", "frames of a video in each prompt of a server"),
    _number("--draft", "tokens that are drafted and verified at once (speculative decoding)", 0),
    Option("--acceptance", "chance that a drafted token is kept (default 0.7)", type=float, default=0.7, metavar="P"),
    Option("--prefill", "devices that read prompts, apart from those of --decode: GPUSxDEVICE:LAYOUT, e.g. 4xh100:tp2",
           metavar="POOL"),
    Option("--decode", "devices that decode what --prefill has read, e.g. 8xh100:tp4 or 16xb200:dp8ep8",
           metavar="POOL"),
    Option("--ttft", "find the smallest fleets with this time to the first token, e.g. 300ms; needs --tpot, --rate",
           type=read_seconds, metavar="TIME"),
    Option("--tpot", "time of each token after the first that fleets keep, e.g. 15ms", type=read_seconds,
           metavar="TIME"),
    Option("--percentile", "percent of the requests that keep --ttft and --tpot (default 90)", type=float, default=90.0,
           metavar="P"),
    Option("--price", "dollars for an hour of one device: 2.5, h100=2.5,h200=3.6, or a FILE with such a list",
           name="prices", dest="prices", metavar="DOLLARS"),
    Option("--carbon", "grams of carbon dioxide for each kWh", type=float, metavar="GRAMS"),
    *(_number(f"--{name}", f"{text} (default: the pipeline's own)") for name, text in (
        ("height", "pixels of an image"), ("width", "pixels of an image"), ("frames", "number of frames of a video"))),
    _number("--steps", "steps of the denoiser (default the pipeline's)", name="denoising steps",
            dest="denoising_steps"),
    Option("--guidance", "scale of classifier-free guidance, 1 for none (default: the pipeline's own)", type=float,
           metavar="S"),
    _number("--ring", "devices that pass keys of a denoiser's tokens around", 1),
    _number("--ulysses", "devices that share the heads of a denoiser", 1))

_OF_SEARCHES = (
    _switch("--batch", "find the largest batch (default)", name="of batch"),
    _switch("--sequence", "find the longest sequence", name="of sequence"),
    Option("--memory", "what the allocator may take, e.g. 20GiB (default: the device's memory, less what is known to "
           "be taken outside of it)", metavar="SIZE"),
    _number("--world", "processes of the job (for communication buffers)", 1, name="world size", dest="world_size"),
    _number("--start", "smallest size to try (default 1; 2 where batch norm needs it)"),
    _number("--multiple-of", "try only multiples of this"),
    _number("--at-most", "largest size to try, e.g. the model's longest sequence"),
    Option("--device", "find the largest size on this device; repeat it for a row for each device (default: a row for "
           "each device of the catalogue)", name="devices", action="append", metavar="DEVICE"),
    Option("--headroom", "memory that must be left, 10% or 4GiB; else the exit code is 3", metavar="ROOM"),
    _switch("--no-advice", "do not look for changes with which the step fits", "no-advice of profile"),
    Option("--sort", "order of the devices that fit: memory (default), time or price", name="sort of devices",
           choices=("memory", "time", "price"), metavar="KEY"),
    Option("--budget", "memory of the whole step, e.g. 24GiB, or a share of the activations', e.g. 50%", required=True,
           metavar="SIZE"),
    Option("--device", "the device whose kernels run and whose time is saved (default: none; FLOPs are saved)",
           name="device of plan"),
    Option("--method", "one of {analyzer.tools.solver.solver_registry:register_solver} (default auto; exact needs "
           "scipy), or what the TARGET's file registers with register_solver", default="auto", metavar="NAME"),
    Option("--granularity", "checkpoints around any operators of the traced graph, or what each repeated block of the "
           "model keeps, runs again and sends to the host (for a --device); by default what takes less time there",
           choices=("auto", "operator", "block"), default="auto"),
    Option("--frontier", "also print the overhead at these budgets (default {analyzer.tools.solver.planner:SHARES})",
           nargs="?", const="analyzer.tools.solver.planner:SHARES", metavar="BUDGETS"),
    _file("--json", "save the plan (read it with analyzer.tools.solver.Plan.from_json)", name="json of plan"))

_OF_SWEEPS = (
    *(Option(f"--{axis}", text, name=f"{axis} axis", metavar="VALUES") for axis, text in (
        ("batch", "batch sizes, e.g. 1,2,4"), ("sequence", "sequence lengths, e.g. 512,1024"),
        ("dtype", "dtypes of the parameters and floating inputs, e.g. float32,bf16 (default: as the model is built)"),
        ("optimizer", "some of none, {analyzer.recipe.optimizer:OPTIMIZERS}, or {analyzer.recipe.optimizer:FORM} "
         "(default none)"),
        ("autocast", "some of none, bf16, fp16 (default none)"),
        ("checkpointing", "no, yes or both: recompute each block in the backward pass (default no)"),
        ("quantize", "some of none, int8, int4, nf4, fp8: format of the weights of linear layers (default none)"),
        ("lora", "ranks of adapters that are trained instead of the model, e.g. none,r=8,r=64 (default none)"),
        ("accumulate", "micro-batches of a step, e.g. 1,8 (default 1)"),
        ("device", "names of `analyzer devices` (default h200)"), ("mode", "train, infer or both (default train)"))),
    _file("--out", "write the rows here: .csv or .jsonl"),
    _number("--workers", "number of processes (default one for each core; 0: only this one)"),
    Option("--dask", "run on the Dask cluster with this scheduler, e.g. tcp://10.0.0.1:8786; its workers with "
           "distributed.worker.profile.enabled: false", metavar="ADDRESS"))

_OF_LAYOUTS = (
    Option("--cluster", "how many devices of which kind, e.g. 64xh100 or 512xdgx_h100", name="devices of a job",
           required=True, metavar="NxDEVICE"),
    _number("--global-batch", "samples of a step (default {analyzer.tools.search.search:GLOBAL_BATCH})"),
    _number("--sequence", "tokens of a sample (default: the model's longest, at most "
            "{analyzer.tools.search.search:LONGEST})", name="tokens of a sample"),
    _number("--count", "how many layouts to rank", 10),
    Option("--choose", "choices of a field of a layout, e.g. tensor=4,8 or compile=no,yes; may be repeated; fields are "
           "{analyzer.tools.search.command:CHOICES}", action="append", default=[], metavar="FIELD=VALUES"),
    _file("--resume", "keep profiled ranks in this file, and continue with those that it has"),
    _file("--json", "also save the result", name="json of layouts"),
    _switch("--no-advice", "do not look for changes that help, nor at other numbers of devices"),
    Option("--export", "write the best layout to FILE for another program, one of "
           "{analyzer.tools.search.export:FORMATS}; may be repeated", name="export of a layout", dest="exports",
           action="append", default=[], metavar="PROGRAM=FILE"))

_OF_JOBS = (
    Option("file", "another program's configuration (.yaml, .toml, .json), or a script that starts it (.sh)",
           name="job file", metavar="FILE", nargs="?"),
    Option("words", "a command instead, after --", name="job command", metavar="-- COMMAND", nargs="*"),
    _number("--world", "devices of the job, where the file does not say how many", name="devices of a job file"),
    Option("--model", "a folder with the config.json of the model, or the name of another one", name="model of a job",
           metavar="MODEL"),
    Option("--show", "also print reports of its step, those of `analyzer profile`, e.g. screen or screen,modules",
           name="show of a job", metavar="NAMES"),
    _file("--write", "write the file with the change that makes it fit, under a new name", name="changed copy"))

_OF_POSTTRAINING = (
    Option("target", "the policy; see `analyzer profile --help`", name="policy", metavar="TARGET", nargs="?"),
    Option("--config", "read the step from a YAML of NeMo RL, or a script that starts verl", metavar="FILE"),
    Option("--algorithm", "one of {analyzer.tools.posttrain.plan:ALGORITHMS} (default grpo)",
           choices="analyzer.tools.posttrain.plan:ALGORITHMS", metavar="NAME"),
    Option("--cluster", "how many devices of which kind, e.g. 8xh100", name="devices of a step", metavar="NxDEVICE"),
    _number("--prompts", "prompts of a step (default 64)"),
    _number("--samples", "answers to each prompt (default 8)", name="samples of a prompt"),
    Option("--prompt-tokens", "tokens of a prompt, in the mean and at most (default 256,512)", type=read_numbers,
           metavar="MEAN[,MAX]"),
    Option("--answer-tokens", "tokens of an answer: MEAN,MAX, or {analyzer.tools.lengths.distribution:GRAMMAR} "
           "(default 1024,4096)", metavar="LENGTHS"),
    _number("--micro-batch-tokens", "tokens of a micro-batch at most (default: one longest prompt and answer)"),
    _number("--score-tokens", "tokens of a pass without gradients at most (default as --micro-batch-tokens)"),
    _number("--updates", "optimizer steps of a step (default 1)"),
    _number("--epochs", "times that answers are learned of (default 1)"),
    Option("--reference", "what the policy is compared with: copy (weights of its own), adapter (it without its "
           "adapters), none (default by the algorithm)", choices=("copy", "adapter", "none"), metavar="NAME"),
    Option("--trainer", "how the trainer's ranks share the model, fields of `analyzer search`, e.g. tensor=2,"
           "sharding=distributed (default fsdp, each block run again)", metavar="FIELD=VALUE,..."),
    _number("--engine-devices", "devices that engines have for themselves (default 0: they share the trainer's)"),
    _number("--sleep", "what of an engine leaves a shared device while the model trains: 0 nothing, 1 cache, and "
            "weights to the host, 2 both (default 1)"),
    Option("--keep", "what of the trainer stays on a shared device while engines sample: weights, optimizer, none "
           "(default none)", metavar="NAMES"),
    _number("--engine-sequences", "sequences of one engine at once at most (default its own)",
            dest="max_sequences_of_engine"),
    _number("--lag", "steps by which the weights that sample are behind, on devices of their own (default 0)"),
    _switch("--in-flight", "engines get new weights without waiting for the longest answers"),
    Option("--oversample", "answers that are sampled for each that is learned of (default 1)", type=float, metavar="X"),
    _switch("--entropy", "the loss has the entropy of each token, a second array of tokens by vocabulary"),
    Option("--choose", "find the fastest that fits: layouts, micro-batches, engines on the same devices or apart",
           name="choose plan", dest="choose_plan", action="store_true"))

_OF_EXPLANATIONS = (
    _file("file", "a memory snapshot, a log with an out-of-memory error or with steps, a trace; packed by gzip or not",
          name="explained file"),
    Option("--against", "a prediction to hold it against: a TARGET with options of `analyzer profile`, a script (.py) "
           "that is run dry, in quotes with its arguments, or a profile saved with --json", name="against of a run",
           metavar="WHAT"),
    Option("--show", "what to tell of a snapshot, some of {analyzer.tools.explain.command:SHOWN} (default peak)",
           name="parts of a snapshot", type=split_words, metavar="NAMES"),
    Option("--device", "the device that it ran on, e.g. h100_sxm: so much may be reserved",
           name="device of a snapshot"),
    _file("--json", "also save what is told", name="json of an explanation"))

_OF_THIS_MACHINE = (
    Option("--device", "where to run: cpu (default), cuda, cuda:1, ...", name="place", default="cpu"),
    _number("--steps", "number of steps that are measured; times are their mean", 3, name="measured steps"),
    _number("--warm-up", "number of steps that run before, and are not measured", 1),
    Option("script", "a Python script that trains or infers", metavar="SCRIPT", type=Path),
    Option("arguments", "the script's own arguments, after --", nargs="*", metavar="-- ARG"),
    _number("--steps", "end the script after so many optimizer steps (default 3, or where its second cycle of rollout "
            "and updates has ended)"),
    _switch("--whole", "run the script to its end: trainers end their steps by themselves, and what follows, such as "
            "an evaluation and a checkpoint, is told too"),
    _switch("--stop-at-oom", "raise the error where memory runs out, as CUDA does (default: go on as on a larger "
            "device, but for code that waits for the error, as finders of batch sizes do)"),
    _switch("--allow-download", "leave names on the hub to the script, which may download them (default: stand-ins)"),
    Option("file", "where to write it, e.g. lab_card.json", name="written file", metavar="FILE"),
    Option("--device", "what to measure: cuda, cuda:1, cpu (default: cuda where there is one, else cpu)",
           name="measured device"),
    _switch("--quick", "measure only a few sizes, in seconds: rates, but little else"),
    _switch("--again", "measure again if FILE exists, and overwrite it"),
    Option("name", "a model, or a part of its name", name="model name", nargs="?", metavar="NAME"),
    Option("--format", "format of the table (default text); csv has the sources, too", name="format of models",
           choices=_FORMATS, default="text"),
    Option("name", "show this device with its sources", name="device name", nargs="?", metavar="DEVICE"))

#: By their names.
OPTIONS = {option.name: option for options in (
    _OF_A_STEP, _OF_RANKS, _OF_OUTPUT, _OF_REPORTS, _OF_SAVED_PROFILES, _OF_GENERATION, _OF_SEARCHES, _OF_SWEEPS,
    _OF_LAYOUTS, _OF_JOBS, _OF_POSTTRAINING, _OF_EXPLANATIONS, _OF_THIS_MACHINE) for option in options}
