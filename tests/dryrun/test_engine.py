"""Scripts whose answers an engine samples: a stand-in holds its memory, takes its time, and leaves nothing behind."""
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from analyzer import Profile
from analyzer.hardware import find_device
from analyzer.tools.dryrun.package import stand_in_packages
from analyzer.tools.dryrun.script import dry_run

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not all(map(importlib.util.find_spec, ("trl", "peft", "datasets"))),
                                reason="trl, peft and datasets are not installed")
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 64,
          "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "max_position_embeddings": 512, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
          "pad_token_id": 0, "torch_dtype": "bfloat16"}
#: The table, of which the head is one; of each block the four products of attention, three more and two norms; a norm.
PARAMETERS = 1024 * 64 + 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
MEMORY = find_device("l4").memory_bytes or 0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


# ---- trainers of TRL, all in one process of their own

SETTINGS = {"asleep": "grpo vllm_enable_sleep_mode=1", "awake": "grpo", "server": "grpo vllm_mode=server",
            "adapters": "grpo vllm_enable_sleep_mode=1 peft=1", "rloo": "rloo vllm_enable_sleep_mode=1",
            "online dpo": "online_dpo", "online dpo, server": "online_dpo vllm_mode=server peft=1"}


_OPTIONS = ("--model_name_or_path llama --output_dir out --report_to none --per_device_train_batch_size 2 "
            "--max_steps 6 --save_strategy no")
_SAMPLED = ("--dataset_name trl-lib/ultrafeedback-prompt --reward_model_name_or_path llama --num_generations 2 "
            "--max_completion_length 16")
#: TRL's own scripts, unmodified: what they are given, and the phases of a cycle.
SCRIPTS = {"grpo.py": (f"{_SAMPLED} --use_vllm --vllm_mode colocate", ("rollout", "scoring", "update", "sync")),
           "rloo.py": (f"{_SAMPLED} --use_vllm --vllm_mode server", ("rollout", "scoring", "update", "sync")),
           "dpo.py": ("--dataset_name trl-lib/ultrafeedback_binarized --max_length 64", ("scoring", "update")),
           "kto.py": ("--dataset_name trl-lib/kto-mix-14k --max_length 64", ("scoring", "update")),
           "reward.py": ("--dataset_name trl-lib/ultrafeedback_binarized", ()),  # which do nothing but update
           "sft.py": ("--dataset_name trl-lib/Capybara --max_length 64", ())}


@pytest.fixture(scope="module")
def profiles(llama: Path) -> dict[str, Profile]:
    import trl

    folder, theirs = llama.parent, Path(trl.__file__).parent / "scripts"
    (folder / "jobs.json").write_text(json.dumps([
        *((name, "post_training.py", ["llama", *words.split()]) for name, words in SETTINGS.items()),
        *((name, str(theirs / name), f"{_OPTIONS} {words}".split()) for name, (words, _) in SCRIPTS.items())]))
    path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, str(HERE / "run_scripts.py"), str(folder), "l4"], capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    for name in (*SETTINGS, *SCRIPTS):
        assert (folder / f"{name}.json").exists(), (folder / f"{name}.txt").read_text()[-4000:] + done.stderr[-999:]
    return {name: Profile.from_json(folder / f"{name}.json") for name in (*SETTINGS, *SCRIPTS)}


@pytest.mark.parametrize("name", SETTINGS)
def test_phases_that_a_reader_recognises(profiles: dict[str, Profile], name: str) -> None:
    second = profiles[name].cycles[-1]
    assert second.number == 2 and {phase.name for phase in second.phases} == {"rollout", "scoring", "update", "sync"}
    assert second.phases[0].name == "rollout" and second.phases[-1].name == "sync"
    pairs = 2 if name.startswith("online dpo") else 1  # two answers to each of 8 prompts; else 8 to 2 of them
    assert (second.samples, second.generated_tokens) == (8 * pairs, 8 * pairs * 32) and second.seconds
    assert all(phase.seconds for phase in second.phases)
    assert sum("vllm: " in text for text in profiles[name].assumptions) == 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_of_trl_as_they_are(profiles: dict[str, Profile], name: str) -> None:
    found = profiles[name]
    assert found.optimizer == "AdamW" and found.peak_allocated_bytes and found.step_seconds
    if phases := SCRIPTS[name][1]:
        assert tuple(phase.name for phase in found.cycles[-1].phases) == phases
    else:
        assert not found.cycles and {timed.phase for timed in found.operators} >= {"forward", "backward", "optimizer"}


def test_what_the_engine_holds(profiles: dict[str, Profile]) -> None:
    """A quarter of the device less the largest pass: 4,096 tokens of two blocks' widest product, 256 columns, and their
    input, in 16 bits, and 8 rows of logits in 32, all twice. Asleep only graphs stay, of passes of 16 tokens.
    """
    asleep, awake = [{phase.name: phase for phase in profiles[name].cycles[-1].phases} for name in ("asleep", "awake")]
    largest = 4096 * 2 * (256 + 2 * 64) * 2 + 2 * 8 * 1024 * 4
    weights, cache = 2 * PARAMETERS, MEMORY // 4 - 2 * PARAMETERS - largest
    for name in ("scoring", "update"):
        held = awake[name].peak_allocated_bytes - asleep[name].peak_allocated_bytes
        assert held == pytest.approx(weights + cache, abs=4096)
    rollout = asleep["rollout"]
    took = rollout.peak_allocated_bytes - rollout.allocated_bytes
    assert weights + cache < took < MEMORY // 4  # with the pass, of two prompts
    passing = awake["rollout"].peak_allocated_bytes - awake["rollout"].allocated_bytes
    assert passing > 2 * 8 * 1024 * 4  # of logits alone
    assert asleep["sync"].peak_allocated_bytes - asleep["update"].allocated_bytes < cache  # which still sleeps


def test_a_server_leaves_the_device_to_the_trainer(profiles: dict[str, Profile]) -> None:
    """But for the weights that are packed to be sent: here all of them, which are fewer than a buffer has room for."""
    server = {phase.name: phase for phase in profiles["server"].cycles[-1].phases}
    assert server["rollout"].peak_allocated_bytes - server["rollout"].allocated_bytes < 64 * 1024
    packed = server["sync"].peak_allocated_bytes - server["sync"].allocated_bytes
    assert packed == pytest.approx(4 * PARAMETERS, abs=64 * 1024)
    again = {phase.name: phase for phase in profiles["awake"].cycles[-1].phases}
    assert again["rollout"].seconds == pytest.approx(server["rollout"].seconds, rel=0.01)


# ---- scripts that call vLLM themselves

def _run(tmp_path: Path, llama: Path, text: str, **options: object):  # type: ignore[no-untyped-def]
    path = tmp_path / "script.py"
    path.write_text(f"import torch\nfrom vllm import LLM, SamplingParams\nFOLDER = {str(llama)!r}\n"
                    + textwrap.dedent(text))
    return dry_run(path, device="l4", **options)  # type: ignore[arg-type]


def test_answers_have_the_lengths_that_were_asked_for(tmp_path: Path, llama: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    run = _run(tmp_path, llama, """
        llm = LLM(FOLDER, gpu_memory_utilization=0.3, dtype="bfloat16", enforce_eager=True)
        first, second = llm.generate(["Hello", {"prompt_token_ids": [5, 6, 7]}],
                                     [SamplingParams(n=2, max_tokens=20, logprobs=0), SamplingParams(max_tokens=None)])
        print([len(one.token_ids) for one in first.outputs], len(second.outputs[0].token_ids), second.prompt_token_ids)
        print(len(llm.get_tokenizer().encode(first.outputs[0].text)), len(first.outputs[0].logprobs),
              second.outputs[0].logprobs)
        print(len(llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=3))[0].outputs[0].text))
        """)
    assert run.error is None, run.format_error()
    assert capsys.readouterr().out.splitlines()[:3] == ["[20, 20] 509 [5, 6, 7]", "20 20 None", "12"]


def test_what_stays_while_it_sleeps(tmp_path: Path, llama: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    run = _run(tmp_path, llama, """
        llm = LLM(FOLDER, gpu_memory_utilization=0.5, enable_sleep_mode=True, enforce_eager=True)
        awake = torch.cuda.memory_allocated()
        for level in (1, 2):
            llm.sleep(level)
            print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
            llm.wake_up(tags=["weights"])
            print(torch.cuda.memory_allocated())
            llm.wake_up()
            print(torch.cuda.memory_allocated() == awake)
        load = llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights
        print(load([("a", torch.zeros(64, 64, device="cuda"))]))
        llm.sleep(2)
        load([("a", torch.zeros(64, 64, device="cuda"))])
        """)
    assert capsys.readouterr().out.splitlines() == ["0 0", str(-(-2 * PARAMETERS // 512) * 512), "True"] * 2 + ["['a']"]
    assert "the engine sleeps: wake it up before a is written" in run.format_error()
    assert run.profile.host_peak_bytes is not None and run.profile.host_peak_bytes >= 2 * PARAMETERS


def test_sglang(tmp_path: Path, llama: Path, capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Half of what is free, weights and cache; graphs beside it are given back where its allocator has them too."""
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "true")
    run = _run(tmp_path, llama, """
        import sglang as sgl
        held = torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda")
        free = torch.cuda.mem_get_info()[0]
        engine = sgl.Engine(model_path=FOLDER, mem_fraction_static=0.5, enable_memory_saver=True)
        taken = free - torch.cuda.mem_get_info()[0]
        print(0 <= taken - free // 2 < 32 * 2**20)
        one = engine.generate("Hello", {"max_new_tokens": 7}, return_logprob=True)
        two = engine.generate(input_ids=[[3, 4], [5]], sampling_params={"n": 2, "max_new_tokens": 5})
        print(len(one["output_ids"]), one["meta_info"]["finish_reason"]["type"], len(two), two[0]["meta_info"])
        engine.release_memory_occupation()
        print(torch.cuda.memory_allocated() - held.nbytes)
        engine.resume_memory_occupation(tags=["weights"])
        print(torch.cuda.memory_allocated() - held.nbytes)
        print(engine.update_weights_from_tensor([("a", torch.zeros(8, device="cuda"))]))
        engine.resume_memory_occupation()
        engine.shutdown()
        print(torch.cuda.memory_allocated() - held.nbytes)
        """)
    assert run.error is None, run.format_error()
    first, lengths, *rest = capsys.readouterr().out.splitlines()
    assert first == "True" and lengths.startswith("7 length 4 {'id': '0', 'prompt_tokens': 2, 'completion_tokens': 5")
    assert rest == ["0", str(-(-2 * PARAMETERS // 512) * 512), "(True, 'Success')", "0"]
    assert any(text.startswith("sglang: a stand-in for version") for text in run.profile.assumptions)


@pytest.mark.parametrize(("line", "said"), [
    ("torch.empty(20 * 2**30, dtype=torch.uint8, device='cuda'); LLM(FOLDER, gpu_memory_utilization=0.9)",
     "on startup is less than desired GPU memory utilization (0.9"),
    ("LLM(FOLDER).beam_search([])", "the stand-in for vllm.LLM in a dry run has no beam_search"),
    ("LLM(FOLDER).generate([[1] * 600])", "a prompt of 600 tokens leaves no room for an answer"),
    ("LLM(FOLDER).collective_rpc('save')", "collective_rpc('save')"),
    ("from vllm import AsyncLLMEngine", "vllm, a stand-in of the dry run"),
    ("import vllm.v1", "No module named 'vllm.v1'")])
def test_what_it_does_not_do(tmp_path: Path, llama: Path, line: str, said: str) -> None:
    assert said in _run(tmp_path, llama, f"kept = {line}" if line.startswith("torch") else line).format_error()


@pytest.mark.parametrize("ends", [None, ValueError, KeyboardInterrupt])
def test_nothing_is_left_of_the_package(ends: type[BaseException] | None) -> None:
    own = sys.modules["vllm"] = ModuleType("vllm")
    try:
        before, finders = dict(sys.modules), list(sys.meta_path)
        try:
            with stand_in_packages():
                vllm = importlib.import_module("vllm")
                assert vllm is not own and vllm.SamplingParams(n=3).n == 3
                with pytest.raises(RuntimeError, match="works during a dry run"):
                    vllm.LLM("any")
                if ends is not None:
                    raise ends
        except (ValueError, KeyboardInterrupt):
            pass
        assert sys.modules["vllm"] is own and sys.meta_path == finders
        assert {name for name in sys.modules if name.split(".")[0] in ("vllm", "trl")} == {
            name for name in before if name.split(".")[0] in ("vllm", "trl")}
    finally:
        del sys.modules["vllm"]
