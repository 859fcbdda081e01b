"""The functions that a module calls outside its submodules, by the name that a user would have written."""
from __future__ import annotations

import re

from analyzer.results.info import ModuleInfo, OperatorInfo

# Where the ATen operator goes by another name than the Python function; torch.nn.functional and torch dispatch so.
_NAMES = {"addmm": "linear", "_addmm_activation": "linear", "bmm": "matmul", "baddbmm": "baddbmm",
          "native_layer_norm": "layer_norm", "native_group_norm": "group_norm", "_softmax": "softmax",
          "_safe_softmax": "softmax", "_log_softmax": "log_softmax", "native_dropout": "dropout",
          "_prelu_kernel": "prelu", "_embedding_bag": "embedding_bag", "nll_loss_forward": "nll_loss",
          "_fused_rms_norm": "rms_norm", "_cudnn_rnn": "rnn", "_unsafe_view": "view", "_to_copy": "to"}
_FAMILIES = ((r".*batch_norm.*", "batch_norm"), (r"_?(adaptive_)?(avg|max)_pool([123])d.*", r"\1\2_pool\3d"),
             (r"_?upsample_.*", "interpolate"), (r"_?scaled_dot_product_.*|_flash_attention.*|_efficient_attention.*",
                                                 "scaled_dot_product_attention"))


def name_function(operator: str, module: ModuleInfo | None = None) -> str:
    """The Python function behind an operator of ``module``; names of functions and of other libraries' operators stay.

    >>> [name_function(name) for name in ("aten.addmm.default", "aten.relu_.default", "softmax", "mylib.scan.default")]
    ['linear', 'relu', 'softmax', 'mylib.scan']
    >>> name_function("aten.convolution.default", ModuleInfo(path="c", type="Conv2d", kernel_size=(3, 3)))
    'conv2d'
    """
    space, _, rest = operator.partition(".")
    if space != "aten":
        return ".".join(operator.split(".")[:2]) if rest else operator
    name = rest.partition(".")[0]
    if "convolution" in name:
        dims = len(module.kernel_size) if module is not None and module.kernel_size else 0
        kind = "conv_transpose" if module is not None and "Transpose" in module.type else "conv"
        return f"{kind}{dims}d" if dims else "convolution"
    if name == "mm":  # a linear layer without a bias, or a product of two activations
        return "linear" if module is not None and any(len(p.shape) == 2
                                                      for p in module.parameters.values()) else "matmul"
    for pattern, function in _FAMILIES:
        if (found := re.fullmatch(pattern, name)) is not None:
            return found.expand(function) if "\\" in function else function
    return _NAMES.get(name, name if name.startswith("_") else name.rstrip("_"))


def list_functions(*modules: ModuleInfo) -> dict[str, OperatorInfo]:
    """The functions that the modules themselves called in the forward pass, by name, the longest first, but those
    without cost.
    """
    found: dict[str, OperatorInfo] = {}
    for module, row in [(m, row) for m in modules for row in m.operators]:
        if row.phase == "forward" and (row.flops != 0 or row.seconds):
            name = name_function(row.operator, module)
            found[name] = found[name] + row if name in found else row
    return dict(sorted(found.items(), key=lambda item: (-(item[1].seconds or 0), -(item[1].flops or 0), item[0])))


def sum_functions(module: ModuleInfo) -> dict[str, OperatorInfo]:
    """The same of the module and everything below it."""
    return list_functions(*module.walk())
