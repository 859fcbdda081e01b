"""Why a row is off by more than 8 %, and why some are set apart. A note is of rows whose id holds one of its parts."""
from __future__ import annotations

from typing import Any, NamedTuple


class Note(NamedTuple):
    """A sentence, and the rows that it is of."""

    parts: tuple[str, ...]
    text: str

    def is_of(self, row: dict[str, Any]) -> bool:
        return any(part in row["id"] for part in self.parts)


NOTES = [
    Note(("modelopt-distill", ), "A second model, the teacher, is loaded from a checkpoint that tells its shape."),
    Note(("cross-entropy-loss-fusion", ),
         "The steps of the loss are under torch.compile, which makes copies of float32 logits where the code writes in "
         "place: one in the row on GB200, more in the row on A100, which is ten months older. The profile is of the "
         "eager steps."),
    Note(("deepseek-proxy-fsdp", "zp-z3"),
         "Megatron-FSDP shards parameters and gradients too; rebuilt is the distributed optimizer."),
    Note(("muon", ), "Muon is rebuilt as Adam, and tokens are taken to be spread evenly over the experts."),
    Note(("sac-rowwise-abs-saved", ),
         "The row shows a fault: what the checkpoint kept were absolute values of gathered weights, within a compiled "
         "region. The profile is of eager steps in 16 bits."),
    Note(("h200-llama3-8b-64gpu-float8", ),
         "Blocks and loss are under torch.compile. The loss is rebuilt as TorchInductor makes it; what it saves of the "
         "blocks is not modelled, and is as in the eager step."),
    Note(("8a100-fused", ),
         "PyTorch of June 2024 with the default allocator, whose FSDP2 and first selective checkpoint held more; "
         "rebuilt are today's."),
    Note(("debug-cp8", ), "Told to two digits (0.25 GiB), of which most are the allocator's blocks and workspaces."),
    Note(("flex", ), "FlexAttention is compiled; rebuilt with scaled_dot_product_attention."),
    Note(("fms-acceleration", ),
         "peft and transformers of the row (4.48) are rebuilt by today's model and this package's adapters."),
]

APART = [Note(("modded-nanogpt",),
              "whole models under torch.compile, with FlexAttention and an 8-bit head, each a script of its own"),
         Note(("llama4-16e",), "grouped products of torchtitan's experts under torch.compile, on B200"),
         Note(("hybrid-hybrid", "nemotron"), "Mamba layers, whose kernels are Triton's, and a dispatcher of DeepEP"),
         Note(("fine-grained-offloading",), "activations offloaded by name, which the released package does not know"),
         Note(("galvatron", "megatron-bridge", "mixtral"), "not rebuilt")]


def note_of(row: dict[str, Any], notes: list[Note]) -> Note | None:
    return next((note for note in notes if note.is_of(row)), None)
