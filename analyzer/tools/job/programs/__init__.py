"""Programs whose configurations are read, a file each; a new one is added to the list here."""
from ..program import JobProgram
from .axolotl import AXOLOTL
from .diffusers import DIFFUSERS
from .llamafactory import LLAMAFACTORY
from .llamafactory_v1 import LLAMAFACTORY_V1
from .megatron_lm import MEGATRON_LM
from .megatron_swift import MEGATRON_SWIFT
from .ms_swift import MS_SWIFT
from .nemo_rl import NEMO_RL
from .script import SCRIPT
from .sd_scripts import SD_SCRIPTS
from .sglang import SGLANG
from .torchtitan import TORCHTITAN
from .torchtune import TORCHTUNE
from .trl import TRL
from .verl import VERL
from .vllm import VLLM

#: In this order files are recognised: what has more names of its own comes first.
PROGRAMS: tuple[JobProgram, ...] = (
    TORCHTUNE, TORCHTITAN, AXOLOTL, LLAMAFACTORY, LLAMAFACTORY_V1, MEGATRON_LM, MEGATRON_SWIFT, MS_SWIFT, NEMO_RL, VERL,
    TRL, DIFFUSERS, SD_SCRIPTS, SCRIPT, VLLM, SGLANG)


def list_programs() -> list[str]:
    """The names of programs, for the help of the command."""
    return [program.name for program in PROGRAMS]
