"""Takes away what nothing reads."""
from __future__ import annotations

from torch import fx

from analyzer.fx.graph.purity import is_pure


def eliminate_dead_code(gm: fx.GraphModule) -> None:
    """Erase nodes whose results are not read and that do nothing else; regions and annotations of the others stay.

    It leaves what writes in place, registers hooks, draws random numbers (those drawn later would change), updates
    buffers or communicates, and functions and modules that are not PyTorch's own, of which nothing is known.

    >>> import torch
    >>> from analyzer import symbolic_trace
    >>> def f(x):
    ...     x.sin().exp()
    ...     y = x.cos()
    ...     y.add_(1)
    ...     return y
    >>> gm = symbolic_trace(f, meta_args={"x": torch.empty(2)})
    >>> eliminate_dead_code(gm)
    >>> [n.name for n in gm.graph.nodes]
    ['x', 'cos', 'add_', 'output']
    """
    gm.graph.eliminate_dead_code(lambda node: not is_pure(node))
    gm.recompile()
