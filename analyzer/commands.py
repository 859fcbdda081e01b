"""The commands as records: what they are for, their options by name, examples, exit codes, and the function of each."""
from __future__ import annotations

from .command import Command
from .options import OPTIONS

_MODEL, _INPUT = "the model failed", "the command line or an input cannot be used"

_STEP = "target, input, batch-size, mode, autocast"
_RECIPE = {"recipe": "dtype, quantize, lora, attention, loss-chunks, checkpointing, compile, optimizer, accumulate"}

COMMANDS = {command.name: command for command in (
    Command("profile", "predict what a step of a model costs", "analyzer.show:run_profile",
            "target, input, batch-size, mode of profile, autocast, skew, device, device count, alloc-conf, headroom, "
            "no-advice of profile, convention, others, show, json, html, export", """\
Predicts what a training or inference step of a model costs: FLOPs, memory, communication, time. It needs no GPU.

TARGET is one of
  vit_b_16 resnet18 resnet50 gpt2 llama_1b llama_405b   models that ship with analyzer
  torchvision:NAME timm:NAME                            e.g. torchvision:resnet50, timm:convnext_tiny
  hf:ConfigClass[:ModelClass]                           e.g. hf:BertConfig, hf:LlamaConfig:LlamaForCausalLM
  hf:NAME[:ModelClass]                                  e.g. hf:llama-3.1-8b; `analyzer models` lists them
  hf:CONFIG.json[:ModelClass]                           a config file, or the folder that holds config.json
  package.module:factory                                a callable of no arguments that returns an nn.Module
  FILE.py:factory                                       such a callable in a file, e.g. a class: mynet.py:Net

Several targets make one table. With --world, a factory wraps the model as a script would: the profile of one rank.
""",
            {"samples of different lengths": "lengths, batching, padding", **_RECIPE,
             "ranks of a job": "world, rank, devices-per-host, cluster, deepspeed"}, """\
analyzer profile vit_b_16 --input 8x3x224x224
analyzer profile hf:BertConfig --input input_ids=int64:8x512 --optimizer adamw --autocast bfloat16
analyzer profile llama_1b --dtype bf16 --quantize nf4 --lora r=16 --checkpointing --optimizer adamw8bit
analyzer profile torchvision:resnet50 --mode infer --device a100 --show summary,modules
analyzer profile mynet.py:Net --input 8x3x224x224 --json net.json && analyzer show net.json --report tree --depth 2
analyzer profile gpt2 --device h100 --autocast bf16 --optimizer adamw --compile --show compile
analyzer profile llama_1b --device h100 --export roofline=llama.csv --export modules=modules.csv
""", {0: "done", 1: _MODEL, 2: _INPUT, 3: "it does not fit on the device"}),

    Command("show", "print reports of a saved profile, in the layout of other tools too", "analyzer.show:run_show",
            "file, report, output", """\
Prints reports of a profile that a command saved with --json: of `analyzer profile` or `measure`, and of the prefill and
the last token that `analyzer generate` saved. An option that none of these reports has is an error.
""", {"layout": "depth, sort, columns, module-depth, top-modules, no-detail, ignore-modules, format of reports, raw",
      "cost of a run": "tokens, samples, prices, gpus, power, carbon"}, """\
analyzer show net.json --report tree --depth 2 --sort fwd_flops --columns fwd_flops_share,saved_bytes
analyzer show net.json --report torchinfo --columns output_size,num_params,mult_adds
analyzer show net.json --report deepspeed --top-modules 3
analyzer show net.json --report modules --format csv --output modules.csv
analyzer show net.json --tokens 2e12 --price 2.5 --gpus 64
""", {0: "done", 2: "the command line or the file cannot be used"}),

    Command("measure", "measure a step of a model on this machine's device",
            "analyzer.tools.runtime.measure:run_measure",
            f"{_STEP}, place, measured steps, warm-up, convention, show, json, html", """\
Runs steps of a model on this machine's device, with random weights and inputs, and tells how long each module and
operator took. TARGET is as for `analyzer profile`.
""", _RECIPE, """\
analyzer measure resnet50 --input 4x3x224x224 --optimizer sgd --steps 5
analyzer measure hf:BertConfig --input input_ids=int64:1x128 --mode infer --convention deepspeed --show deepspeed
analyzer measure gpt2 --device cuda --json measured.json && analyzer compare predicted.json measured.json
""", {0: "done", 1: _MODEL, 2: _INPUT}),

    Command("calibrate", "measure this machine's device and write a file that --device takes",
            "analyzer.tools.calibration.calibrate:run_calibrate", "written file, measured device, quick, again", """\
Measures this machine's device: bandwidth, products by format and size, attention, convolutions, copies, and what the
host needs for each operator. Writes FILE, which --device takes in every command. A few minutes.
""", {}, """\
analyzer calibrate lab_card.json
analyzer calibrate host.json --device cpu --quick
analyzer profile resnet50 --input 8x3x224x224 --device lab_card.json
""", {0: "done", 2: "the command line cannot be used", 130: "interrupted"}),

    Command("compare", "what changed between two saved profiles, and which modules explain it",
            "analyzer.show:run_compare", "first, second, more, by, fail-if, markdown, html, "
            "columns of compare, format of compare, output", """\
Tells what changed from the first profile to the second: peaks, time, FLOPs, memory at the peak by category, and for
each quantity the deepest modules that explain it, alike blocks as one.

--fail-if CONDITION makes it a gate: it exits with {analyzer.report.check:EXCEEDED} where a condition is met, or asks \
for what is unknown.
  'FIELD > +N%'   more than N percent above the first profile (-N%: less than N percent below it)
  'FIELD > +N'    more than so much above it, e.g. 'peak_allocated_bytes > +200MiB'
  'FIELD > N'     more than N, whatever the first profile has, e.g. 'step_seconds > 0.5'
with >, >=, < or <=. FIELD is any quantity of `analyzer check`, also by its path: peak_by_category.activation.

Three or more profiles, --by model or --columns give one table with a row for each.
""", {}, """\
analyzer profile mynet.py:Net --input 8x3x224x224 --json before.json          # on the base branch
analyzer profile mynet.py:Net --input 8x3x224x224 --json after.json           # with a change
analyzer compare before.json after.json
analyzer compare before.json after.json --fail-if "peak_allocated_bytes > +2%" --fail-if "step_seconds > 0.5"
analyzer compare before.json after.json --markdown "$GITHUB_STEP_SUMMARY"     # examples/ci/ has the workflow
analyzer compare small.json medium.json large.json
analyzer compare before.json after.json --columns params,phases.forward.peak_allocated_bytes
analyzer compare *.json --by model --format latex --output models.tex     # or csv: numbers unrounded; markdown
""", {0: "done", 2: _INPUT, 4: "a condition of --fail-if is met, or a quantity that it needs is unknown"}),

    Command("check", "whether a saved profile is within limits, for CI", "analyzer.report.check:run_check",
            "checked file, against, max, format", """\
Compares a saved profile with a baseline, and exits with {analyzer.report.check:EXCEEDED} where a quantity is above \
its limit.
Without FILE the `analyzer profile` that made the baseline is run again, on the code as it is now.

LIMIT is one of
  'FIELD +N%'   at most N percent above the baseline (-N%: at least N percent below)
  'FIELD +N'    at most so much above the baseline, e.g. 'peak_allocated_bytes +100MiB', 'step_seconds +5ms'
  'FIELD N'     at most N, whatever the baseline, e.g. 'peak_reserved_bytes 40GiB', 'fwd_flops 2.5T'
FIELD is a quantity of the profile:
{analyzer.report.quantity:list_names}
or a path, e.g. phases.forward.peak_allocated_bytes, first_step.backward.flops, peak_by_category.activation.
Without --max, none of these may grow:
{analyzer.report.check:MAIN}
""", {}, """\
analyzer profile mynet.py:Net --input 8x3x224x224 --json baseline.json        # on the main branch
analyzer profile mynet.py:Net --input 8x3x224x224 --json profile.json         # with a change
analyzer check profile.json --against baseline.json --max "peak_allocated_bytes +2%" --max "fwd_flops +0%"
analyzer check --against baseline.json --max "peak_allocated_bytes +2%"       # profiles again: a pre-commit hook
analyzer check profile.json --max "peak_reserved_bytes 40GiB"                 # no baseline
analyzer check profile.json --against baseline.json --format markdown >> "$GITHUB_STEP_SUMMARY"
""", {0: "all within their limits", 2: _INPUT, 4: "a limit is exceeded, or a quantity that it needs is unknown"}),

    Command("generate", "predict what generating tokens costs", "analyzer.tools.generation.run:run_generate",
            "target, prompt, new-tokens, sequences, autocast, device, alloc-conf, passes, rows, format, "
            "json", """\
Predicts what it costs to read a prompt and to generate tokens after it: the prefill, then one token after the other
while the key-value cache grows. TARGET is that of `analyzer profile`, a model that generates text.

--engine transformers launches kernel by kernel, as its generate() does. --engine server runs each pass as one CUDA
graph with the kernels of vLLM, SGLang or TensorRT-LLM, reads prompts in chunks beside requests that decode, and tells
what requests see at a --concurrency or --rate. With --ttft, --tpot and --rate: the smallest fleets, and how to start
them.

diffusers:CONFIG is a pipeline of images or videos: a folder with model_index.json and configs, the same as one JSON
file, or a name such as FLUX.1-dev. --batch of them, --attention flash (default) or sdpa.
""", {"serving (decoders of transformers)": "cache, cache-dtype, block-size, max-sequences, memory-share, batches, "
      "prefill-chunk", "server": "engine, server, server-version, receive-interval, stream-interval, batch-wait, "
      "burst, concurrency, rate, weights, experts, images, image-size, video-frames, skew, draft, acceptance, prices,"
      " carbon",
      "ranks of a server": "tp, pp, dp, ep, cluster, prefill, decode",
      "fleets": "ttft, tpot, percentile",
      "pipelines of diffusers": "height, width, frames, denoising steps, guidance, ring, ulysses",
      "recipe": "dtype, quantize, lora, attention, compile"}, """\
analyzer generate gpt2 --prompt 512 --new-tokens 128
analyzer generate hf:LlamaConfig:LlamaForCausalLM --prompt 2048 --batch 8 --dtype bfloat16 --cache static
analyzer generate hf:llama-3.1-8b --quantize int4 --cache paged --cache-dtype fp8 --batch 16
analyzer generate hf:llama-3.1-8b --engine server --concurrency 8,32,128 --prompt 1024 --new-tokens 512 --device h100
analyzer generate hf:llama-3.1-70b --weights fp8 --tp 4 --rate 2 --prompt 2048 --new-tokens 512 --price 2.5
analyzer generate hf:llama-3.1-8b --ttft 300ms --tpot 15ms --rate 20 --prompt 2048 --new-tokens 256 --device h100,l40s
analyzer generate hf:llama-3.1-8b --prompt 8192 --max-sequences --device h100_sxm
analyzer generate hf:mistral-7b-v0.3 --prompt 4096 --batches 1,2,4,8,16,32 --device l4
analyzer generate diffusers:stable-diffusion-xl-base-1.0 --batch 4 --height 768 --width 768 --steps 30 --device h100
analyzer generate hf:T5Config:T5ForConditionalGeneration --json t5.json && analyzer show t5.json --report tree
""", {0: "done", 1: _MODEL, 2: _INPUT, 3: "the generation does not fit on the device"}),

    Command("fit", "find the devices that a step fits on, or the largest batch or sequence on one",
            "analyzer.tools.solver.fit:run_fit",
            f"{_STEP}, devices, device count, alloc-conf, of batch, of sequence, memory, world size, start, "
            "multiple-of, at-most, headroom, prices, sort of devices, format", """\
Tells for every device in the catalogue (`analyzer devices`) how much memory a training or inference step needs there,
whether it fits, how long it takes and with --price what it costs. With one --device, or an option of a search (--batch,
--sequence, --memory, --start, --multiple-of, --at-most; then h200): the largest batch, or with --sequence the longest
sequence, that fits.

TARGET and the options of a step are those of `analyzer profile`; in an --input, {batch} or {sequence} may stand for the
size that is searched for. Without it the batch is the first dimension of every input, the sequence the second of inputs
of token indices.
""", _RECIPE, """\
analyzer fit vit_b_16 --input 64x3x224x224 --optimizer adamw
analyzer fit hf:BertConfig --input input_ids=int64:8x512 --mode infer --device t4 --device l4
analyzer fit resnet50 --optimizer adamw --headroom 10% --price h100=2.5,l40s=0.9,l4=0.7 --sort price
analyzer fit resnet50 --device a100_80gb --optimizer adamw
analyzer fit gpt2 --sequence --at-most 1024 --multiple-of 64 --device t4 --optimizer adamw
analyzer fit mypackage.models:build --input 'x={batch}x64' --memory 20GiB
""", {0: "it fits on a device, or a size was found", 1: _MODEL, 2: _INPUT,
        3: "no device and no size fits, with the --headroom that was asked for"}),

    Command("advise", "find what to change so that a step fits", "analyzer.tools.advice.search:run_advise",
            f"{_STEP}, device, device count, alloc-conf, format", """\
Says what to change so that a step fits on a device, or takes less there: checkpointing, parts of the loss, the
optimizer, precision, adapters, attention and micro-batches, each profiled alone, then in combinations until three fit.
TARGET and the options of a step are those of `analyzer profile`; they say how the step is now.
""", _RECIPE, """\
analyzer advise hf:llama-3.1-8b --input input_ids=int64:4x2048 --optimizer adamw --device a100_80gb
analyzer advise resnet50 --input 256x3x224x224 --optimizer adamw --device t4
analyzer advise hf:qwen2.5-7b --input input_ids=int64:8x4096 --mode infer --device l4
""", {0: "it fits, as it is or with a change", 1: _MODEL, 2: _INPUT, 3: "no change that was tried makes it fit"}),

    Command("plan", "plan activation checkpointing for a budget of memory", "analyzer.tools.solver.planner:run_plan",
            "target, input, batch-size, budget, device of plan, method, granularity, autocast, frontier, html, "
            "json of plan", """\
Finds what to run again in the backward pass (activation checkpointing), and with --device also what to send to the host
meanwhile, so that a training step stays within a budget of memory and takes as little longer as possible. The planned
program is run before the plan is printed: the peak and the overhead are its own.

TARGET and --input are those of `analyzer profile`.
""", {"recipe": "dtype, quantize, lora, attention, loss-chunks, compile, optimizer"}, """\
analyzer plan vit_b_16 --budget 50%
analyzer plan gpt2 --budget 50% --device h100 --compile     # the partitioner's budget for the same memory too
analyzer plan torchvision:resnet152 --input 64x3x224x224 --device a100 --optimizer adamw --budget 20GiB
analyzer plan gpt2 --budget 90% --device h100 --granularity block --json plan.json
analyzer plan llama_1b --budget 60% --frontier 90%,75%,50%,40% --html plan.html

A budget with a unit is of the whole step (parameters, gradients, optimizer states); a percentage is of the
activations' memory at its peak.
""", {0: "found", 1: _MODEL, 2: "the command line, an input or the budget cannot be used", 3: "no plan meets it"}),

    Command("job", "read another program's configuration, and what to change in it so that it fits",
            "analyzer.tools.job.command:run_job",
            "job file, job command, device, devices of a job file, cluster, model of a job, alloc-conf, "
            "no-advice of profile, changed copy, prices, show of a job, json, html, lengths, batching, padding", """\
Reads the configuration that another program trains or serves with, or the command that starts it, and tells what the
job needs: what was understood and what was not, whether it fits, how long a step takes, and what to change in the very
file. Nothing of it is executed, and nothing is downloaded.

Programs:
{analyzer.tools.job.programs:list_programs}
""", {}, """\
analyzer job qlora.yml --device rtx_4090
analyzer job qlora.yml --device rtx_4090 --write smaller.yml
analyzer job -- accelerate launch --config_file fsdp.yaml train.py --per_device_train_batch_size 4
analyzer job --device l40s -- vllm serve Qwen/Qwen3-32B --tensor-parallel-size 2 --max-model-len 32768
""", {0: "it fits", 1: _MODEL, 2: _INPUT, 3: "it does not fit as it is"}),

    Command("explain", "what a real run left behind: a memory snapshot, an out-of-memory error, a log, a trace",
            "analyzer.tools.explain.command:run_explain",
            "explained file, against of a run, parts of a snapshot, device of a snapshot, html, "
            "json of an explanation", """\
Reads what a real run left behind and tells what took its memory and its time. FILE is known by its content.

A memory snapshot (torch.cuda.memory._dump_snapshot): the peak and what was held then, by what it is for and by line of
code, the largest blocks, and what was there before recording began. It is read without executing anything of it, in a
process with limits of memory and time. --show reserved tells which segments are kept by which line and what is lost
to rounding, pieces, streams and private pools; settings runs the recorded requests again under other settings of the
allocator; growth tells what each step holds more than the one before.

A log with out-of-memory errors of PyTorch, of any program and of many ranks: who has the memory, this process, another
one or the cache, and whether it is in pieces, another's or simply too little.

A log of a run's steps (trainer_state.json, train_results.json and printed dictionaries of transformers' Trainer, lines
of torchtitan, metrics.csv of Lightning, nvidia-smi --format=csv): times, speeds and memory, with warm-up, outliers and
drift told apart, and what the file does not tell.

A trace of torch.profiler (export_chrome_trace, packed or not): what a step is spent on, by operator, kernel and class
of module, how long the device waits for its host, and communication beside which nothing is computed.

--against: of a snapshot, which blocks the run and the prediction both hold at their peaks, and which one of them alone;
of an error, at which module the predicted step fails with as much memory, by how much, and the least change that would
do; of a log of steps and of a trace, each figure beside the predicted one; of a trace also the largest differences, and
what is launched and not predicted.
""", {"the step of --against": "input, mode of profile, autocast", **_RECIPE}, """\
analyzer explain snapshot.pickle
analyzer explain snapshot.pickle --show reserved,settings,growth
analyzer explain train.log --against hf:llama-3.1-8b --lora r=16 --input input_ids=int64:4x4096 --optimizer adamw
analyzer explain snapshot.pickle.gz --json explained.json
""", {0: "the file was read", 2: "the command line or the file cannot be used"}),

    Command("dryrun", "execute a training script without data or a GPU", "analyzer.tools.dryrun.job:run_dryrun",
            "script, arguments, device, device count, alloc-conf, steps, whole, stop-at-oom, no-advice of profile, "
            "allow-download, show, json, html", """\
Executes a training script without data, weights or a GPU, ends it after a few optimizer steps and prints what a step
costs. The script is run as `python SCRIPT ARGS` would run it and needs no change. What it prints is passed through;
what it does besides torch (files it writes, servers it calls) happens. The profile lists what was
assumed.

Where the memory of the device does not suffice, the script goes on as on a larger device: what it prints says where it
would fail first, what its peak is, and what to change. Code of the script or of its libraries that waits for an
out-of-memory error, as finders of batch sizes do, is given one.

A model that the script names as on the hub (from_pretrained("meta-llama/Llama-3.1-8B")) is the shape of that name that
ships, with a tokenizer that stands in for its own; a data set of load_dataset is a stand-in with the same columns.
Nothing is downloaded, unless --allow-download leaves that to the script.

With --world the script runs as torchrun would start it, one rank at a time: torch.distributed is there for so many
ranks and moves no data. Without --rank or --ranks the ranks to run are chosen: the first, the last, one of each further
pipeline stage, and rank 1 where first and last differ. Each runs in a process of its own; what the first one prints is
passed through. --json saves the table of ranks with a profile of each, --html a page of the table and its ranks.
""", {"ranks of a job": "world, rank, ranks, devices-per-host, cluster"}, """\
analyzer dryrun train.py
analyzer dryrun train.py --device a100_80gb --steps 3 -- --batch-size 64 --amp
analyzer dryrun --world 64 train.py                        as torchrun would start it on 64 GPUs, some ranks of it
analyzer dryrun --world 64 --ranks 0,8,63 --cluster dgx_h100 train.py
""", {0: "done", 1: "the script failed", 2: "the command line cannot be used",
      3: "the script would run out of memory, or does not fit on the device"}),

    Command("sweep", "profile many configurations of a model", "analyzer.tools.sweep.run:run_sweep",
            "target, input, " + ", ".join(name for name in OPTIONS if name.endswith(" axis")) + ", out, html, "
            "workers, dask", """\
Profiles many configurations of a model: every combination of the values given, one row each.

TARGET and --input are those of `analyzer profile`; in an --input, {batch} and {sequence} may stand for sizes.
Without them the batch is the first dimension of every input, the sequence the second of inputs of token indices.
A configuration that fails is kept as a row with its error.
""", {}, """\
analyzer sweep gpt2 --batch 1,2,4,8 --sequence 512,1024 --optimizer sgd,adamw --autocast none,bf16
analyzer sweep torchvision:resnet50 --batch 32,64,128 --checkpointing no,yes --html sweep.html --workers 2
analyzer sweep mypackage.models:build --input 'x={batch}x{sequence}x64' --batch 1,2 --sequence 128 --out results.csv
""", {0: "done", 1: "every configuration failed", 2: _INPUT, 130: "interrupted"}),

    Command("search", "find the fastest ways to train a model on a cluster", "analyzer.tools.search.command:run_search",
            "target, devices of a job, tokens, prices, global-batch, tokens of a sample, count, choose, resume, "
            "workers, dask, no-advice, json of layouts, html, export of a layout", """\
Finds the fastest layouts of a training job that fit: data, tensor, sequence, context and pipeline parallelism,
sharding, micro-batches, checkpoints. Few ranks are profiled, as `analyzer profile --world` does; steps are composed
of these.

TARGET is as for `analyzer profile`. Tensor parallelism follows a model's tp_plan.
""", {}, """\
analyzer search hf:llama-3.1-8b --cluster 64xh100 --global-batch 512 --sequence 8192 --tokens 300e9 --price 2.5
analyzer search llama_405b --cluster 16384xdgx_h100 --global-batch 2048 --sequence 8192 --choose tensor=8
analyzer search gpt2 --cluster 8xa100_80gb --sequence 1024 --choose compile=no,yes --export torchtitan=gpt2.toml
analyzer search hf:qwen3-32b --cluster 256xh100 --resume qwen.jsonl --html qwen.html
""", {0: "done", 1: _MODEL, 2: _INPUT, 3: "nothing fits", 130: "interrupted"}),

    Command("posttrain", "plan a step of RL post-training: rollout, scoring, updates, and what to change",
            "analyzer.tools.posttrain.command:run_posttrain",
            "policy, config, algorithm, devices of a step, devices-per-host, prices, no-advice of profile, "
            "choose plan, json of layouts", """\
Predicts a step of post-training phase by phase: seconds and what bounds them, memory of a card and of a host, what the
longest answers cost, dollars of 1,000 steps, whether it fits, the room that is left, and what to change first.

Updates and scoring are composed of profiled ranks as `analyzer search` does, rollouts are simulated as
`analyzer generate --engine server` does: of answers of differing lengths.
""", {"the step": "prompts, samples of a prompt, prompt-tokens, answer-tokens, oversample, updates, epochs, reference",
      "the trainer": "trainer, micro-batch-tokens, score-tokens, lora, loss-chunks, entropy, keep",
      "the engines": "engine-devices, server, tp, pp, dp, ep, memory-share, engine-sequences, weights, experts, sleep, "
      "lag, in-flight"}, """\
analyzer posttrain hf:qwen2.5-7b --cluster 8xh100 --prompts 64 --samples 8 --answer-tokens 1024,4096 --price 2.5
analyzer posttrain hf:qwen3-32b --cluster 64xh100 --engine-devices 32 --lag 1 --in-flight --trainer tensor=4
analyzer posttrain hf:llama-3.1-8b --algorithm dpo --cluster 8xh100 --answer-tokens answers.txt
analyzer posttrain --config grpo.yaml --cluster 8xh100
analyzer posttrain hf:qwen2.5-7b --cluster 16xh100 --choose
""", {0: "it fits", 1: _MODEL, 2: _INPUT, 3: "it does not fit", 130: "interrupted"}),

    Command("view", "look at saved profiles in a browser", "analyzer.show:run_view", "files, html of view, no-browser",
            """\
Writes the page of a saved profile and opens it. FILE is what `analyzer profile --json` wrote, or a table of ranks
(`analyzer dryrun --json`, RankTable.to_json). For two profiles the page shows what changed from the first to the
second.

The page shows the command that made its profile: change the batch, device or precision in it, and compare.
""", {}, """\
analyzer profile hf:BertConfig --optimizer adamw --json bert.json && analyzer view bert.json
analyzer view before.json after.json --no-browser --html changed.html
""", {0: "done", 2: "the command line or a file cannot be used"}),

    Command("models", "list the open models that hf:NAME takes, or one with its sources",
            "analyzer.api.models_command:run_models", "model name, format of models", """\
Lists the open models whose published shapes come with analyzer, to be given as hf:NAME, with or without the
organisation, in any case. Shapes are config files as they were published, without weights.
""", {}, """\
analyzer models                     all of them
analyzer models llama               those with "llama" in a name
analyzer models llama-3.1-8b        this one, with the sources of its figures
analyzer models --format csv
"""),

    Command("devices", "list the hardware catalogue, or one device with the source of each figure",
            "analyzer.api.models_command:run_devices", "device name"))}
