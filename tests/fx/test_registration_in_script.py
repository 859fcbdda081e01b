"""What a user's script registers for functions and classes of its own: `__main__` is there under two names."""
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import multiprocessing
import sys
import torch
from torch import nn
from analyzer import symbolic_trace
from analyzer.fx import register_leaf_function
import analyzer

def twice(x):
    return x * 2

class Block(nn.Module):
    def forward(self, x):
        return twice(x) + 1

assert sys.modules["__mp_main__"] is sys.modules["__main__"]
before = twice
for registry, given in ((analyzer.register_shape_impl, (twice, lambda x: x.new_empty(x.shape))),
                        (register_leaf_function, (twice,)), (analyzer.register_tracer_impl, (twice, lambda x: x + x)),
                        (analyzer.register_leaf_module_impl, (Block, lambda m, x: x.new_empty(x.shape))),
                        (analyzer.register_leaf_module, (Block,))):
    with registry.scope():
        registry(*given)
        for _ in range(2):
            gm = symbolic_trace(Block(), meta_args={"x": torch.empty(3)})
            print([str(n.target if isinstance(n.target, str) else n.target.__name__) for n in gm.graph.nodes
                   if n.op.startswith("call")], gm(torch.ones(3)).tolist(), twice is before)
"""
CALLS = [["twice", "add"]] * 4 + [["add", "add"]] * 2 + [["mul", "add"]] * 4  # a root is never a leaf


def test_functions_of_a_script_are_traced_as_registered(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path,
                         env={"PYTHONPATH": str(ROOT), "PATH": ""})
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"{calls} [3.0, 3.0, 3.0] True" for calls in CALLS]
