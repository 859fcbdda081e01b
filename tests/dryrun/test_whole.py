"""The whole job: what a script has on the device and on the host as it loads, trains, evaluates, saves and resumes."""
import textwrap
from pathlib import Path

import pytest

from analyzer.api.result import Profile
from analyzer.cli import main
from analyzer.distributed.world_state import WorldSpec
from analyzer.results.info import CycleInfo, CyclePhase
from analyzer.tools.dryrun.script import dry_run
from analyzer.tools.dryrun.whole import describe_nodes

MIB = 2**20


def run(folder: Path, text: str, steps: int | None = None) -> Profile:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    found = dry_run(path, steps=steps, whole=True)
    assert found.error is None, found.format_error()
    return found.profile


def phases_of(profile: Profile) -> dict[str, CyclePhase]:
    assert profile.course is not None
    return {phase.name: phase for phase in profile.course.phases}


PLAIN = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 2048, bias=False))    # 4 and 8 MiB
weights = {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}
model.load_state_dict(weights)
del weights
model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
def train(steps):
    for _ in range(steps):
        model(torch.randn(1024, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
train(2)
with torch.no_grad():
    model(torch.randn(4096, 1024, device="cuda"))                                # 16, 16 and 32 MiB
train(1)
SAVE
"""
SAVES = {
    # each storage is copied to the host alone: the largest has 8 MiB
    "torch.save": ("torch.save({'model': model.state_dict(), 'states': optimizer.state_dict()}, 'all.pt')", 8),
    # all are, until the file is written
    "safetensors": ("from safetensors.torch import save_file\nsave_file(model.state_dict(), 'model.safetensors')", 12),
    # by the script itself, which then holds them all; what is on the host already is not copied
    "a copy on the host": ("copy = {name: value.cpu() for name, value in model.state_dict().items()}\n"
                           "torch.save(copy, 'model.pt')", 12)}


@pytest.mark.parametrize("way", SAVES)
def test_a_script_from_loading_to_saving(way: str, tmp_path: Path) -> None:
    code, saved = SAVES[way]
    profile = run(tmp_path, PLAIN.replace("SAVE", code))
    assert profile.course is not None and profile.course.steps == 3
    found = phases_of(profile)
    assert found["loading"].host_peak_bytes == 24 * MIB  # both copies
    assert found["loading"].allocated_bytes == found["loading"].peak_allocated_bytes == (12 + 4) * MIB  # and a batch
    assert found["first step"].steps == 1 and found["steady steps"].parts == 2
    # weights, two moments of each, and in a step gradients and activations besides
    assert found["evaluation"].peak_allocated_bytes >= (36 + 16 + 16 + 32) * MIB
    assert (found["evaluation"].host_peak_bytes or 0) < MIB and found["evaluation"].passes == 1
    saving = found["saving"]
    assert saved * MIB <= (saving.host_peak_bytes or 0) < (saved + 1) * MIB
    assert saving.peak_allocated_bytes == (36 + 2 * 32) * MIB  # and cuBLAS' workspaces of both threads on an H200


def test_a_script_resumes(tmp_path: Path) -> None:
    profile = run(tmp_path, PLAIN.replace("SAVE", """
import torch.distributed.checkpoint as dcp
state = {"model": model.state_dict()}
dcp.save(state, checkpoint_id="folder")
dcp.load(state, checkpoint_id="folder")
"""))
    found = phases_of(profile)
    assert {"saving", "resuming"} <= set(found)
    # DefaultSavePlanner copies what it writes to the host, file by file
    assert (found["saving"].host_peak_bytes or 0) >= 8 * MIB


def test_a_block_that_loads_is_loading_whatever_it_calls(tmp_path: Path) -> None:
    """A state dict that a checkpointer keeps from before the first step is no save."""
    profile = run(tmp_path, PLAIN.replace("SAVE", "").replace("def train(steps):", """
from torch.distributed.checkpoint.state_dict import get_model_state_dict
with torch.profiler.record_function("load"):
    kept = get_model_state_dict(model)
def train(steps):"""))
    assert set(phases_of(profile)) == {"loading", "first step", "steady steps", "evaluation", "after the steps"}


def test_without_the_option_it_ends_after_its_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN.replace("SAVE", "raise SystemExit(3)"))
    found = dry_run(tmp_path / "train.py")
    assert found.is_stopped and found.error is None and found.profile.course is None


TRAINER = """
import tempfile, torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
class Tokens(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        tokens = torch.randint(0, 1024, (32,))
        return {"input_ids": tokens, "labels": tokens}
model = LlamaForCausalLM(LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                                     num_key_value_heads=2, vocab_size=4096, use_cache=False))
arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, num_train_epochs=5,
                              eval_strategy="epoch", save_strategy="epoch", report_to=[], disable_tqdm=True)
trainer = Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens())
trainer.train()
trainer.train(resume_from_checkpoint=True)
"""
LIGHTNING = """
import tempfile, torch
import lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1024, 1024)
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    validation_step = training_step
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
data = DataLoader(TensorDataset(torch.zeros(256, 1024)), batch_size=8)
trainer = L.Trainer(max_epochs=9, logger=False, enable_progress_bar=False, enable_model_summary=False,
                    default_root_dir=tempfile.mkdtemp(), num_sanity_val_steps=0)
trainer.fit(Module(), data, data)
"""


@pytest.mark.parametrize(("text", "names", "saved_bytes", "evaluations"), [
    # embeddings and head of 4,096 * 256, and two layers: all weights are on the host at once; evaluated twice
    (TRAINER, {"loading", "first step", "steady steps", "evaluation", "saving", "resuming"}, 2 * 4096 * 256 * 4, 4),
    # weights and two moments, in a buffer
    (LIGHTNING, {"loading", "first step", "steady steps", "evaluation", "saving"}, 3 * 1024 * 1024 * 4, 32)],
    ids=["transformers", "lightning"])
def test_trainers_end_by_themselves(
        text: str, names: set[str], saved_bytes: int, evaluations: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers" if text is TRAINER else "lightning")
    profile = run(tmp_path, text, steps=2)
    found = phases_of(profile)
    assert names <= set(found)
    assert found["evaluation"].passes == evaluations  # of all there is, in batches of 8
    assert saved_bytes <= (found["saving"].host_peak_bytes or 0) < 2 * saved_bytes
    assert (found["first step"].host_peak_bytes or 0) < MIB + 1024  # Lightning's data have one


@pytest.mark.parametrize(("device_map", "host_bytes"), [("None", 4 * 124_439_808), ("'cuda'", 4 * 50_257 * 768)])
def test_weights_are_read_to_the_host_or_one_by_one_to_the_device(
        device_map: str, host_bytes: int, tmp_path: Path) -> None:
    """Without ``device_map`` all of GPT-2 is on the host; with it the largest weight is, the embeddings."""
    pytest.importorskip("transformers")
    profile = run(tmp_path, f"""
    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.float32, device_map={device_map}).cuda()
    x = torch.zeros(2, 8, dtype=torch.long, device="cuda")
    model(x, labels=x).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    """)
    peak = phases_of(profile)["loading"].host_peak_bytes
    assert peak is not None and host_bytes <= peak < host_bytes + MIB


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(PLAIN.replace("SAVE", SAVES["torch.save"][0]))
    assert main(["dryrun", str(tmp_path / "train.py"), "--whole"]) == 0
    out = capsys.readouterr().out
    rows = [line.split()[0] for line in out[out.index("The whole job"):].splitlines()[1:4]]
    assert rows[:3] == ["loading", "first", "steady"]


# ---- ranks and nodes

def make(*phases: tuple[str, int, int, int]) -> Profile:
    return Profile(name="rank", mode="train", course=CycleInfo(0, 3, tuple(
        CyclePhase(name, 1, 0, 0, None, None, 0, device, None, None, None, None, at_end, peak)
        for name, device, peak, at_end in phases), None, None, None, None))


def test_the_ranks_of_a_node_share_its_host() -> None:
    """Four to a node: rank 0 gathers 40 MiB to save, others save nothing and hold 1 MiB; each loads 10 MiB."""
    first = make(("loading", 5 * MIB, 10 * MIB, MIB), ("saving", 9 * MIB, 40 * MIB, 0))
    other = make(("loading", 6 * MIB, 10 * MIB, MIB))
    text = describe_nodes({0: first, 1: other, 7: other}, WorldSpec.of(8, 0, 4, None))
    assert text is not None
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert rows[1:] == ["loading 6.00 MiB 10.00 MiB 40.00 MiB 0", "saving 9.00 MiB 40.00 MiB 43.00 MiB 0",
                        "5 ranks that were not run are taken as rank 1"]
    assert describe_nodes({0: Profile(name="rank", mode="train")}, WorldSpec.of(8, 0, 4, None)) is None
