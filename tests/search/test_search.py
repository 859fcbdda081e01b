"""The search: who profiles changes nothing, an interruption neither; what the result says and writes."""
import json
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analyzer.cli import main
from analyzer.errors import InputError, ProfileFormatError
from analyzer.parallel import search
from analyzer.tools.search.advice import list_changes, list_neighbors, raise_by_half
from analyzer.tools.search.bound import DOES_MORE, least_bytes
from analyzer.tools.search.export import export
from analyzer.tools.search.layout import Layout, Question, Space, list_layouts
from analyzer.tools.search.probe import Probe, ProbeJournal, Subject, run_probes
from analyzer.tools.search.result import SearchResult
from analyzer.tools.search.search import Interrupted, Searcher, read_cluster
from analyzer.tools.search.stage import Piece
from analyzer.zoo.llama import Llama, LlamaConfig
from analyzer.zoo.target import Target

OPTIONS = {"global_batch": 8, "sequence": 64, "count": 2, "advice": False, "tensor": 1, "pipeline": [1, 2],
           "micro_batch": 1, "checkpointing": "none", "sharding": "fsdp_kept", "schedule": "1F1B"}


def small() -> Llama:
    return Llama(LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False))


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(small, "4xh100", tokens=1e6, price=2.0, **OPTIONS)


def test_an_interrupted_search_goes_on_to_the_same_answer(found: SearchResult, tmp_path: Path) -> None:
    journal = tmp_path / "search.jsonl"
    made: list[str] = []

    def stop(share: float, text: str) -> None:
        made.append(text)
        if len(made) == 3:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="^3 ranks were profiled"):
        search(small, "4xh100", resume=journal, progress=stop, **OPTIONS)
    with journal.open("a") as file:
        file.write('["a line that was being wri')
    with ThreadPoolExecutor(1) as pool:  # as of Dask: any executor
        again = search(small, "4xh100", tokens=1e6, price=2.0, resume=journal, executor=pool, **OPTIONS)
    assert again.steps == found.steps
    assert again.counts == found.counts
    assert len(journal.read_text().splitlines()) == 2 + found.profiles  # a head, each rank once, and half a line


def test_an_interrupted_search_answers_with_what_it_knows(
        found: SearchResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shares: list[float] = []

    def stop(share: float, text: str) -> None:
        shares.append(share)
        if text.startswith("best so far: "):
            raise KeyboardInterrupt

    monkeypatch.setattr("analyzer.tools.search.search._SOON", 0)
    with pytest.raises(Interrupted, match="; best so far: ") as stopped:
        search(small, "4xh100", progress=stop, **OPTIONS)
    assert shares == sorted(shares) and shares[-1] < 0.3  # one step is composed before all bounds are known
    known = stopped.value.result
    assert known is not None and known.fits and known.best in found.composed
    assert f"best: {known.best.layout}" in str(known).splitlines()

    def interrupt(*_args: Any, **_options: Any) -> SearchResult:
        raise stopped.value

    monkeypatch.setattr("analyzer.tools.search.command.search", interrupt)
    assert main(["search", "small", "--cluster", "4xh100"]) == 130
    output = capsys.readouterr()
    assert str(known) in output.out and "analyzer: interrupted: " in output.err
    assert "--resume FILE would have kept them" in output.err


def test_a_search_tells_how_far_it_is() -> None:
    told: list[tuple[float, str]] = []
    search(small, "4xh100", progress=lambda share, text: told.append((share, text)), **{**OPTIONS, "pipeline": 1})
    shares = [share for share, _ in told]
    assert shares == sorted(shares) and len(set(shares)) == len(shares) and shares[-1] == 1.0


def test_a_journal_of_another_search_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"format": "another"}\n')
    with pytest.raises(ProfileFormatError, match="was written by another search or version; give another file"):
        search(small, "4xh100", resume=path, **OPTIONS)


def test_a_model_of_images_is_laid_out_by_data() -> None:
    choices = dict(sharding=["ddp", "fsdp"], precision=["mixed", "bf16"], micro_batch=2, checkpointing="none")
    found = search("resnet18", "2xh100", global_batch=4, count=4, advice=False, **choices)
    assert {str(step.layout) for step in found.steps} == {"ddp 2, 1 x 2", "ddp 2, 1 x 2, bf16", "fsdp 2, 1 x 2, bf16"}
    # `fully_shard` casts the parameters of batch norms, and leaves their statistics
    assert found.failed == {"RuntimeError: expected scalar type BFloat16 but found Float": 1}
    assert found.sequence == 1  # an image has no tokens


def test_the_least_short_layouts_are_told_where_nothing_fits() -> None:
    choices = Space.of({**{name: OPTIONS[name] for name in ("tensor", "micro_batch", "sharding", "schedule")},
                        "pipeline": 1, "checkpointing": ["none", "blocks"]})
    subject = Subject(Target("small", small), read_cluster("4xh100")[1], 64)
    searcher = Searcher(subject, Question(4, 8, 8, 64, choices), ProbeJournal(None, {}),
                        run_probes)
    layouts = list_layouts(searcher.question, searcher.facts)
    searcher.capacity = int(max(least_bytes(layout, searcher.sizes, None) for layout in layouts))  # states, no more
    searcher.bound()
    searcher.rank(1)
    assert searcher.best is None and {layout.checkpointing for layout in searcher.steps} == {"none", "blocks"}
    assert searcher.counts["activations do not fit"] == 2 and not searcher.rough


def test_advice_where_tokens_are_not_divided(found: SearchResult) -> None:
    best = replace(found.best, layout=replace(found.best.layout, sequence_parallel=False))
    assert best.layout.tensor == 1
    asked: list[Layout] = []
    searcher: Any = SimpleNamespace(best=best, steps={best.layout: best}, evaluate=asked.extend, fits=lambda step: True)
    assert list_changes(searcher) == ()  # as nothing could be run
    assert asked[:3] == [replace(best.layout, compile=True),
                         replace(best.layout, micro_batches=2 * best.layout.micro_batches),
                         replace(best.layout, precision="bf16")]


def test_the_best_of_half_and_of_twice_as_many_devices() -> None:
    choices = Space.of({**{name: OPTIONS[name] for name in ("tensor", "micro_batch", "sharding", "schedule")},
                        "pipeline": 1, "checkpointing": "none"})
    told: list[str] = []
    searcher = Searcher(Subject(Target("small", small), read_cluster("4xh100")[1], 64), Question(4, 8, 8, 64, choices),
                        ProbeJournal(None, {}), run_probes,
                        lambda share, text: told.append(text))
    found = {devices: step for devices, step in list_neighbors(searcher) if step is not None}
    assert {devices: step.layout.devices for devices, step in found.items()} == {2: 2, 8: 8}
    assert found[8].step_seconds < found[2].step_seconds and told[0].startswith("on 2 devices: ")


def test_bounds_follow_from_half_as_many_devices() -> None:
    """Which take twice as many micro-batches: a step of 8 s or a bound of 9 s makes it 4 or 4.5 s at least."""
    kept, copies = Layout(shard=4, sharding="fsdp_kept", micro_batches=8), Layout(replicate=4, micro_batches=8)
    known: Any = SimpleNamespace(steps={kept: SimpleNamespace(step_seconds=8.0)}, bounds={kept: 1.0, copies: 9.0})
    bounds = {replace(kept, shard=8, micro_batches=4): 1.0, replace(copies, replicate=8, micro_batches=4): 5.0,
              replace(kept, shard=8, micro_batches=4, tensor=2): 1.0, replace(kept, shard=9, micro_batches=4): 1.0,
              replace(kept, shard=8): 1.0, replace(copies, shard=2, micro_batches=4): 1.0}
    raise_by_half(bounds, known)
    assert [*bounds.values()] == [DOES_MORE * 4, 5.0, 1.0, 1.0, 1.0, 1.0]


class LostWorkers(Executor):
    """As a pool of processes of which one was killed."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        lost: Future[Any] = Future()
        lost.set_exception(BrokenProcessPool("a process was terminated abruptly"))
        return lost


def test_a_lost_process_says_nothing_of_a_layout() -> None:
    with pytest.raises(InputError, match=(
            "another process could not profile a rank: BrokenProcessPool: a process was terminated abruptly; give")):
        search(small, "4xh100", executor=LostWorkers(), **OPTIONS)


def test_what_failed_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "search.jsonl"
    probes = [Probe(Layout(shard=shard), Piece(1)) for shard in (1, 2)]
    journal = ProbeJournal(path, {})
    journal.add(probes[0], {"step_seconds": 1.0})
    journal.add(probes[1], {"error": "ModuleNotFoundError: No module named 'torchao'"})
    assert list(journal.known) == [probe.key for probe in probes]
    assert ProbeJournal(path, {}).known == {probes[0].key: {"step_seconds": 1.0}}


def test_no_layout_takes_the_batch() -> None:
    with pytest.raises(InputError, match="no layout of small on 4 devices makes a step of 7 samples"):
        search(small, "4xh100", **{**OPTIONS, "global_batch": 7, "tensor": 1, "pipeline": 1})


@pytest.mark.parametrize(("asked", "said"), [
    ({"global_batch": 0}, "search(global_batch=0): must be a whole number of at least 1"),
    ({"sequence": -1}, "search(sequence=-1): must be a whole number of at least 1"),
    ({"tokens": -5.0}, "search(tokens=-5.0): must be a positive number"),
    ({"price": 0}, "search(price=0): must be a positive number")])
def test_what_cannot_be_asked(asked: dict[str, float], said: str) -> None:
    with pytest.raises(InputError) as error:
        search(small, "4xh100", **{**OPTIONS, **asked})
    assert str(error.value) == said


def test_what_a_result_says(found: SearchResult) -> None:
    best = found.best
    seconds = best.step_seconds
    assert found.tokens_per_second(best) == 8 * 64 / seconds
    assert found.days(best) == pytest.approx(1e6 / (8 * 64) * seconds / 86400)
    assert found.dollars(best) == pytest.approx(1e6 / (8 * 64) * seconds / 3600 * 4 * 2.0)
    assert [row["layout"] for row in json.loads(found.to_json())["layouts"]] == [str(s.layout) for s in found.steps]
    lines = str(found).splitlines()
    assert lines[0] == "small on 4 h100_sxm: steps of 8 samples of 64 tokens"
    assert f"best: {best.layout}" in lines and max(map(len, lines)) <= 120
    assert "fsdp_kept 4, 2 x 1" in found.table()  # 8 samples of 4 ranks
    assert lines.count("N x M in a layout: of each rank N micro-batches a step, of M samples each") == 1


def test_files_for_other_programs(found: SearchResult) -> None:
    step = next(step for step in found.composed if step.layout.tensor == 1 and step.layout.pipeline == 1)
    assert str(step.layout) == "fsdp_kept 4, 2 x 1"
    toml = export(found, "torchtitan", step=step)
    assert "data_parallel_shard_degree = 4\n" in toml and 'fsdp_reshard_after_forward = "never"\n' in toml
    assert json.loads(export(found, "deepspeed", step=step))["zero_optimization"]["stage"] == 2
    assert "--micro-batch-size 1 \\\n--global-batch-size 8 \\\n" in export(found, "megatron", step=step)
    assert "  fsdp_reshard_after_forward: false\n" in export(found, "accelerate", step=step)
    pipeline = next(step for step in found.composed if step.layout.pipeline == 2)
    with pytest.raises(InputError, match="deepspeed has them in the model's code; export another layout"):
        export(found, "deepspeed", step=pipeline)
    # of two blocks each stage has one
    assert ('module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]\n'
            in export(found, "torchtitan", step=pipeline))
    arguments = export(found, "megatron", step=pipeline)
    assert "--pipeline-model-parallel-layout 'E,t*1|t*1,L' \\\n" in arguments
    assert arguments.startswith("# gradients are whole on each rank, which the search has in shards: more memory\n--")
    with pytest.raises(InputError, match="must be of torchtitan, megatron, deepspeed, accelerate"):
        export(found, "nemo")


def test_accelerate_reads_its_file(found: SearchResult, tmp_path: Path) -> None:
    config = pytest.importorskip("accelerate.commands.config.config_args")
    step = next(step for step in found.composed if step.layout.pipeline == 1)
    layout = replace(step.layout, replicate=2, shard=8, compile=True, checkpointing="blocks")
    text = export(found, "accelerate", tmp_path / "fsdp.yaml", replace(step, layout=layout))
    read = config.ClusterConfig.from_yaml_file(tmp_path / "fsdp.yaml")
    assert text.startswith("# Accelerator(gradient_accumulation_steps=2), batches of 1 a device\n")
    assert (read.num_processes, read.num_machines, read.fsdp_config["fsdp_version"]) == (16, 2, 2)
    assert read.parallelism_config["parallelism_config_dp_replicate_size"] == 2


@pytest.mark.parametrize(("changed", "program", "said"), [
    ({"optimizer": "sgd"}, "torchtitan", "is given AdamW alone, this layout has another optimizer"),
    ({"optimizer": "sgd"}, "deepspeed", "is given AdamW alone, this layout has another optimizer"),
    ({"checkpointing": "planned"}, "torchtitan", "takes no plan of blocks"),
    ({"checkpointing": "selective"}, "megatron", "has other selective checkpoints, and no plan of blocks"),
    ({"precision": "bf16"}, "megatron", "keeps float32 copies"),
    ({"compile": True}, "megatron", "compiles no blocks"),
    ({"precision": "float8"}, "accelerate", "keeps parameters in float32, and has another float8")])
def test_what_a_program_cannot_run(found: SearchResult, changed: dict[str, str], program: str, said: str) -> None:
    step = next(step for step in found.composed if step.layout.pipeline == 1)
    other = replace(step, layout=replace(step.layout, **changed))
    with pytest.raises(InputError, match=f"{program} {said}.*; export another layout of the search"):
        export(found, program, step=other)


@pytest.mark.parametrize(("changed", "program", "expected"), [
    ({"sharding": "fsdp", "replicate": 2, "shard": 2}, "deepspeed", '"mics_shard_size": 2'),
    ({"sharding": "zero1", "replicate": 4, "shard": 1}, "deepspeed", '"stage": 1'),
    ({"precision": "float8"}, "torchtitan", '[quantize.linear.float8]\nrecipe_name = "rowwise"\n'),
    ({"expert": 2}, "torchtitan", "expert_parallel_degree = 2\n"),
    ({"expert": 2}, "megatron", "--expert-model-parallel-size 2 "),
    ({"sharding": "fsdp"}, "megatron", "--data-parallel-sharding-strategy optim_grads_params "),
    ({"sharding": "fsdp"}, "torchtitan", 'fsdp_reshard_after_forward = "default"\n'),
    ({"shard": 12}, "accelerate", "num_machines: 2\nnum_processes: 12\n"),
    ({"compile": True}, "accelerate", "  dynamo_use_regional_compilation: true\n")])
def test_what_a_program_is_told(found: SearchResult, changed: dict[str, object], program: str, expected: str) -> None:
    step = next(step for step in found.composed if step.layout.pipeline == 1)
    assert expected in export(found, program, step=replace(step, layout=replace(step.layout, **changed)))
