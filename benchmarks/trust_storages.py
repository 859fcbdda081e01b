"""Predicted births and deaths of memory on this host against those that the CPU's own allocator reports.

    python -m benchmarks.trust --only storages                                   # all models, for docs/reliability.md
    python -m benchmarks.trust_storages timm:vit_tiny_patch16_224 torch.nn:LSTM  # these, with what differs
"""
from __future__ import annotations

import difflib
import gc
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from analyzer import profile
from analyzer.record.eager import default_loss
from analyzer.record.log import Log
from analyzer.record.tensor_walk import tensors_in

from .coverage import list_cases
from .coverage_case import Candidate, Case, Inputs
from .page import Found, keep
from .storage_events import Block, Trail, predicted_trail, running_bytes, storages_of, watch_memory

#: The models that are compared: names of the coverage benchmark, small enough to run.
_NAMES = """
torchvision:squeezenet1_1 torchvision:shufflenet_v2_x0_5 torchvision:mobilenet_v3_small torchvision:mnasnet0_5
torchvision:resnet18 torchvision:mobilenet_v2 torchvision:lraspp_mobilenet_v3_large torchvision:regnet_y_400mf
torchvision:efficientnet_b0 torchvision:densenet121 torchvision:googlenet torchvision:raft_small

timm:test_vit timm:test_resnet timm:test_efficientnet timm:test_convnext timm:test_byobnet timm:test_nfnet
timm:test_mambaout timm:test_vit2 timm:test_efficientnet_gn timm:test_maxvit timm:test_vit3 timm:test_coatnet
timm:test_convnext2 timm:test_efficientnet_ln timm:test_vit4 timm:test_convnext3 timm:test_efficientnet_evos
timm:test_vit_relpos timm:lcnet_050 timm:resnet10t timm:tinynet_e timm:vit_tiny_patch16_224 timm:edgenext_xx_small
timm:regnetx_002 timm:mobilevit_xxs timm:pvt_v2_b0 timm:convnextv2_atto timm:ghostnet_050 timm:deit_tiny_patch16_224
timm:levit_128s timm:gmlp_ti16_224 timm:xcit_nano_12_p8_224 timm:repvit_m0_9 timm:coat_tiny

transformers:AlbertForMaskedLM transformers:BartForConditionalGeneration transformers:BertForMaskedLM
transformers:BloomForCausalLM transformers:CLIPModel transformers:DebertaV2ForTokenClassification
transformers:DistilBertForMaskedLM transformers:ElectraForPreTraining transformers:GPT2LMHeadModel
transformers:GPTNeoXForCausalLM transformers:Gemma2ForCausalLM transformers:LlamaForCausalLM
transformers:LongformerForMaskedLM transformers:MambaForCausalLM transformers:MixtralForCausalLM
transformers:ModernBertForSequenceClassification transformers:MptForCausalLM transformers:OPTForCausalLM
transformers:PhiForCausalLM transformers:Qwen2ForCausalLM transformers:Qwen3MoeForCausalLM
transformers:ReformerForMaskedLM transformers:RobertaForMaskedLM transformers:RwkvForCausalLM
transformers:SegformerForSemanticSegmentation transformers:T5ForConditionalGeneration
transformers:ViTForImageClassification transformers:ViltForQuestionAnswering transformers:Wav2Vec2ForCTC
transformers:WhisperForConditionalGeneration transformers:XLNetLMHeadModel

diffusers:AutoencoderKL diffusers:ControlNetModel diffusers:DiTTransformer2DModel diffusers:PixArtTransformer2DModel
diffusers:SD3Transformer2DModel diffusers:UNet2DConditionModel diffusers:UNet2DModel diffusers:UNet3DConditionModel

torch.nn:Bilinear torch.nn:CTCLoss torch.nn:ConvTranspose2d torch.nn:CrossEntropyLoss torch.nn:EmbeddingBag
torch.nn:GRU torch.nn:GroupNorm torch.nn:InstanceNorm2d torch.nn:LSTM torch.nn:LSTMCell torch.nn:MultiheadAttention
torch.nn:RMSNorm torch.nn:RNN torch.nn:Transformer torch.nn:weight|norm
"""
_names = [name.replace("|", " ") for name in _NAMES.split()]
_families = [[n for n in _names if n.startswith(f)] for f in dict.fromkeys(n.partition(":")[0] for n in _names)]
#: families in turn, so that the first few are of all
MODELS = tuple(name for row in itertools.zip_longest(*_families) for name in row if name)

_NUMBER = "`torch.tensor` of a number is predicted as `scalar_tensor`, which is left out here with other numbers"
_LENGTHS = ("the CPU reads the lengths and goes on with numbers (LossCTC.cpp, ctc_loss); without data they stay "
            "tensors")
#: why a model's storages differ, where that was found
CAUSES = {
    **dict.fromkeys(("torch.nn:CTCLoss", "transformers:Wav2Vec2ForCTC"), _LENGTHS),
    "transformers:DebertaV2ForTokenClassification": "what TorchScript makes of a number is held to the end of the run",
    "transformers:ViltForQuestionAnswering": "it asks whether a mask is all true, which is data: a profile lists in "
                                             "its assumptions that it took the answer for no",
    "torchvision:raft_small": "8 bytes of a tensor in a list of its CorrBlock are predicted, and not counted here with "
                              "what is there before the measured steps",
    **dict.fromkeys(("transformers:BloomForCausalLM", "transformers:LongformerForMaskedLM",
                     "transformers:MptForCausalLM"), _NUMBER),
}
STEPS = 2  # the first makes gradients and states of the optimizer
SEED = 0
EQUAL, DEATHS, DIFFERENT = "equal", "equal but for deaths in a row", "different"


@dataclass
class Comparison:
    """One step of one model, predicted and measured."""

    model: str
    mode: str
    predicted: Trail  #: storages alone, as `measured`
    measured: Trail
    predicted_peak_bytes: int  #: with what operators hold while they run, as `measured_peak_bytes`
    measured_peak_bytes: int
    temporaries: Counter[str] = field(default_factory=Counter)  #: measured bytes alive at that peak, by operator

    @property
    def verdict(self) -> str:
        """Whether the same storages are born and die in the same order."""
        one, other = (name_events(trail) for trail in (self.predicted, self.measured))
        if one == other:
            return EQUAL
        return DEATHS if sort_deaths(one) == sort_deaths(other) else DIFFERENT

    @property
    def storage_peaks(self) -> tuple[int, int]:
        """The predicted and the measured peak of storages alone."""
        return max(running_bytes(self.predicted)), max(running_bytes(self.measured))

    @property
    def has_equal_ends(self) -> bool:
        """Whether as many bytes are allocated at the end of every phase of both steps."""
        return self.predicted.bytes_at_ends() == self.measured.bytes_at_ends()

    def tell(self) -> str:
        """One line."""
        births = [len(trail.births()) for trail in (self.predicted, self.measured)]
        return (f"{self.verdict}: births {births[0]:,} predicted, {births[1]:,} measured; peak of storages "
                f"{self.storage_peaks[0]:,} and {self.storage_peaks[1]:,} bytes; with temporaries "
                f"{self.predicted_peak_bytes:,} and {self.measured_peak_bytes:,}; ends of phases "
                f"{'equal' if self.has_equal_ends else 'differ'}")


Named = tuple[str, int, int]  # what happens, to which birth, how many bytes


def name_events(trail: Trail) -> list[Named]:
    """The events of a trail, each storage named by the number of its birth."""
    numbers: dict[int, int] = {}
    named = []
    for is_birth, block in trail.events:
        if is_birth:
            numbers[id(block)] = len(numbers)
        named.append(("born" if is_birth else "died", numbers.get(id(block), -1), block.nbytes))
    return named


def sort_deaths(events: Iterable[Named]) -> list[Named]:
    """The same with deaths that follow each other directly in the order of their births, for none can be told from
    another by its effect.
    """
    rows = itertools.groupby(events, lambda event: event[0] == "born")
    return [event for is_birth, row in rows for event in (row if is_birth else sorted(row))]


def compare_step(name: str, candidate: Candidate, mode: str) -> Comparison:
    """Profile a step, run it on data, and put both side by side."""
    torch.manual_seed(SEED)
    trains = mode == "train"
    model = candidate.build().train(trains)
    args, kwargs = candidate.make_inputs(model, trains)
    logs: list[Log] = []
    found = profile(model, args, kwargs, mode=mode, optimizer="adamw" if trains else None,  # type: ignore[arg-type]
                    loss_fn=candidate.loss_fn, device="cpu", profilers={"log": keep(logs)})
    assert found.param_bytes == sum(p.numel() * p.itemsize for p in model.parameters()), "parameters"
    predicted = predicted_trail(logs[-1])
    measured = run_watched(model, (args, kwargs), trains, candidate.loss_fn or default_loss)
    return Comparison(name, mode, storages_of(predicted), storages_of(measured), max(running_bytes(predicted)),
                      max(running_bytes(measured)), temporaries_at_peak(measured))


def run_watched(model: torch.nn.Module, inputs: Inputs, trains: bool, loss_fn: Callable[[Any], torch.Tensor]) -> Trail:
    """The steps that `profile` says it predicts, written out, on data and with nothing between them and PyTorch but its
    own profiler.
    """
    args, kwargs = inputs
    optimizer = torch.optim.AdamW(model.parameters()) if trains else None

    def run(phase: Callable[[int, str], Any]) -> None:
        for step in range(STEPS):
            with phase(step, "forward"), torch.set_grad_enabled(trains):
                output = loss_fn(model(*args, **kwargs)) if trains else model(*args, **kwargs)
            if optimizer is not None:
                with phase(step, "backward"):
                    output.backward()
            del output
            if optimizer is not None:
                with phase(step, "optimizer"):
                    optimizer.step()
                with phase(step, "zero_grad"):
                    optimizer.zero_grad()

    there = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
             for t in (*model.parameters(), *model.buffers(), *tensors_in(inputs)) if t.layout is torch.strided}
    return watch_memory(run, sum(there.values()))


def temporaries_at_peak(trail: Trail) -> Counter[str]:
    """Bytes of temporaries alive when a trail is highest, by the operator that they are of."""
    totals = list(running_bytes(trail))
    place = totals.index(max(totals)) - 1
    found: Counter[str] = Counter()
    for block in trail.births():
        if block.is_temporary and block.born <= place < (block.died or 0):
            found[block.operator] += block.nbytes
    return found


def choose_candidate(case: Case) -> Candidate:
    """The first way to build and call a model in which PyTorch itself can run it."""
    for candidate in case.candidates():
        try:
            for trains in (False, True):
                torch.manual_seed(SEED)
                model = candidate.build().train(trains)
                args, kwargs = candidate.make_inputs(model, trains)
                with torch.no_grad():
                    model(*args, **kwargs)
        except Exception:
            continue
        return candidate
    raise RuntimeError(f"{case.name}: PyTorch cannot run it here")


def compare_models(names: Sequence[str]) -> Iterator[tuple[str, str, Comparison | Exception]]:
    """Both steps of each model compared, or what one failed with."""
    warnings.simplefilter("ignore")
    cases = {case.name: case for case in list_cases(sorted({name.partition(":")[0] for name in names}))}
    torch.set_num_threads(1)
    for name in names:
        candidate = choose_candidate(cases[name])
        for mode in ("infer", "train"):
            try:
                yield name, mode, compare_step(name, candidate, mode)
            except Exception as error:
                yield name, mode, error
            gc.collect()


def list_differences(found: Comparison, limit: int = 12) -> list[str]:
    """Where both trails differ, in a shortest list of insertions and deletions."""
    one, other = ([(is_birth, block.nbytes) for is_birth, block in trail.events]
                  for trail in (found.predicted, found.measured))
    lines: list[str] = []
    for kind, start, end, first, last in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if kind != "equal":
            lines += [_describe("predicted alone", *event) for event in found.predicted.events[start:end]]
            lines += [_describe("measured alone", *event) for event in found.measured.events[first:last]]
    if not lines:
        return ["storages of one size die in another order"]
    return [*lines[:limit], *([f"... and {len(lines) - limit} more"] if len(lines) > limit else [])]


def _describe(side: str, is_birth: bool, block: Block) -> str:
    return (f"{side}: {'birth' if is_birth else 'death'} of {block.nbytes:,} bytes of {block.operator}"
            + ("" if is_birth else f" in {block.died_operator}"))


@dataclass
class Row:
    """What the page tells of one step."""

    model: str
    mode: str
    verdict: str = "failed"
    births: int = 0            #: measured
    has_equal_ends: bool = False
    has_equal_peaks: bool = False
    peak_over: float = 0.0     #: measured peak with temporaries over the predicted one, less 1
    temporaries: list[str] = field(default_factory=list)  #: operators that hold more than 1 % of that peak
    remark: str = ""           #: what differs first, or why it failed


def make_row(model: str, mode: str, found: Comparison | Exception) -> Row:
    """The row of a comparison."""
    if isinstance(found, Exception):
        return Row(model, mode, remark=f"{type(found).__name__}: {found}"[:200])
    peaks = found.storage_peaks
    return Row(model, mode, found.verdict, len(found.measured.births()), found.has_equal_ends, peaks[0] == peaks[1],
               found.measured_peak_bytes / found.predicted_peak_bytes - 1,
               [op for op, nbytes in found.temporaries.items() if nbytes > 0.01 * found.measured_peak_bytes],
               list_differences(found)[0] if found.verdict == DIFFERENT else "")


def measure(count: int | None = None) -> Found:
    """The oracle for docs/reliability.md: the first ``count`` models, or all of the list."""
    rows = []
    for model, mode, found in compare_models(MODELS[:count]):
        rows.append(make_row(model, mode, found))
        print(f"{model} ({mode}): {rows[-1].verdict} {rows[-1].remark}", flush=True)
    return make_section(rows)


def make_section(rows: Sequence[Row]) -> Found:
    """The block of the page."""
    over = sorted(row.peak_over for row in rows if row.verdict != "failed" and not row.model.startswith("torch.nn:"))
    holders = Counter(op for row in rows for op in row.temporaries)
    most = ", ".join(f"`{operator}` ({times})" for operator, times in holders.most_common(8))
    families = dict.fromkeys(row.model.partition(":")[0] for row in rows)
    table = "\n".join([*(_sum_up(f"of {family}", [row for row in rows if row.model.startswith(family + ":")])
                         for family in families), _sum_up("in all", rows)])
    tried = {"models": len({row.model for row in rows}), "steps": len(rows), "births": sum(row.births for row in rows)}
    lost = [f"`{row.model}` ({row.mode}): {CAUSES.get(row.model, 'cause not found')}; first difference: "
            f"{row.remark or 'bytes at the ends of phases'}" for row in rows
            if row.verdict not in (EQUAL, DEATHS) or not row.has_equal_ends or not row.has_equal_peaks]
    return Found(tried, lost, f"""
| models | steps | births | equal | but for deaths in a row | different | ends of phases equal | peaks equal |
|---|---:|---:|---:|---:|---:|---:|---:|
{table}

With temporaries, the measured peak of a whole model (single layers of torch.nn left out) is above the predicted one by
{over[len(over) // 2]:.2%} in the median, {over[len(over) * 9 // 10]:.1%} or less in nine of ten steps, and
{over[-1]:.1%} at most. Operators whose temporaries are more than 1 % of a step's peak, and in how many steps: {most}.
""")


def _sum_up(label: str, rows: Sequence[Row]) -> str:
    verdicts = Counter(row.verdict for row in rows)
    counts = " | ".join(str(verdicts[verdict]) for verdict in (EQUAL, DEATHS, DIFFERENT))
    return (f"| {len({row.model for row in rows})} {label} | {len(rows)} | {sum(row.births for row in rows):,} | "
            f"{counts} | {sum(row.has_equal_ends for row in rows)} | {sum(row.has_equal_peaks for row in rows)} |")


def main(names: Sequence[str]) -> int:
    """Compare models by name, and print what differs."""
    different = 0
    for name, mode, found in compare_models(names or MODELS):
        different += isinstance(found, Exception) or found.verdict == DIFFERENT
        print(f"{name} ({mode}): " + (f"{type(found).__name__}: {found}" if isinstance(found, Exception)
                                      else found.tell()), flush=True)
        if isinstance(found, Comparison) and found.verdict == DIFFERENT:
            print(*(f"    {line}" for line in list_differences(found)), sep="\n", flush=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
