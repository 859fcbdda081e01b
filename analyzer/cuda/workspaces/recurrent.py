"""What cuDNN's recurrent layers keep for their backward pass, and what they and PyTorch hold while they run. PyTorch's
part is read from ``aten/src/ATen/native/cudnn/RNN.cpp``. cuDNN is closed (``cudnnGetRNNTempSpaceSizes``): `RnnLayers`
says of which tensors its sizes are assumed to be the sum. They give the bytes that one H200 with cuDNN 9.19 asked for,
of one LSTM in float32 (two layers of 1024 units, 64 sequences of 256 steps of 512 features, dropout), and those
reported of two layers in cuDNN 7, but for groups of steps. Projections, other dtypes and inference were not seen.
"""
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from analyzer.meta.operator_info import Stage, kernel_stages
from analyzer.meta.spec import Signature, TensorSpec

from .convolution import Inferred
from .kernel_temporary import copy_bytes

_aten = torch.ops.aten
RELU, TANH, LSTM, GRU = range(4)  # cudnnRNNMode_t
GATES = (1, 1, 4, 3)  # of a cell, by mode
KEPT = (1, 1, 5, 6)   # numbers of each step and unit that backward needs, by mode
#: Steps whose input one product multiplies at once, forward and in the gradient of the data: from the kernels of that
#: LSTM, 8 and 32 groups of its 256 steps. By what cuDNN chooses them is not known.
FORWARD_STEPS, BACKWARD_STEPS = 32, 8
_NUMBER_BYTES = 4


class RnnLayers(NamedTuple):
    """Recurrent layers and the sequences that they run on.

    >>> found = RnnLayers.of((64, 256, 512), LSTM, 1024, 0, 2, True, False, ())
    >>> matrices = 4 * 1024 * (512 + 3 * 1024)
    >>> found.reserve_bytes(4, dropout=True), found.workspace_bytes(matrices, 4, training=True)
    (740294912, 516948736)
    """

    mode: int
    features: int
    hidden: int
    output: int      #: units of one direction that it gives on: as many as the projection has, where there is one
    layers: int
    directions: int
    batch: int
    steps: int
    rows: int        #: steps of all sequences
    is_packed: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], mode: int, hidden_size: int, proj_size: int, num_layers: int, batch_first: bool,
           bidirectional: bool, batch_sizes: tuple[int, ...] | list[int]) -> RnnLayers:
        """From the arguments of ``aten::_cudnn_rnn``; ``shape`` is that of its input."""
        if batch_sizes:
            batch, steps, rows = batch_sizes[0], len(batch_sizes), sum(batch_sizes)
        else:
            steps, batch = (shape[1], shape[0]) if batch_first else (shape[0], shape[1])
            rows = steps * batch
        return cls(mode, shape[-1], hidden_size, proj_size or hidden_size, num_layers, 1 + bidirectional, batch, steps,
                   rows, bool(batch_sizes))

    @classmethod
    def of_call(cls, named: dict[str, Any]) -> RnnLayers:
        """From the arguments of a call of it, or of its backward pass, by their names."""
        return cls.of(named["input"].shape, *(named[name] for name in (
            "mode", "hidden_size", "proj_size", "num_layers", "batch_first", "bidirectional", "batch_sizes")))

    @property
    def width(self) -> int:
        """Features of the output: of all directions."""
        return self.directions * self.output

    def reserve_bytes(self, itemsize: int, dropout: bool) -> int:
        """Bytes that cuDNN keeps for backward. Of each step and layer an LSTM's four gates and cell, a GRU's three
        gates before and after the recurrent part, a plain layer's output; what a projection is given (assumed); the
        output of each layer but the last, and with dropout a bit of each of those. A number a sequence, unless packed.

        As cuDNN reported for four layers of 320 units and 25 000 steps (github.com/pytorch/pytorch/issues/2895), and
        for one of 800 in two directions and 326 steps of 64 sequences (SeanNaren/deepspeech.pytorch#172):

        >>> [RnnLayers.of((25_000, 123), mode, 320, 0, 4, False, False, [100] * 250).reserve_bytes(4, dropout=False)
        ...  for mode in (LSTM, GRU)]
        [736000000, 864000000]
        >>> RnnLayers.of((326 * 64, 672), GRU, 800, 0, 1, False, True, [64] * 326).reserve_bytes(4, dropout=False)
        801177600
        """
        units = self.rows * self.directions * self.hidden
        kept = KEPT[self.mode] + (self.output != self.hidden)
        inner = self.rows * self.width * (self.layers - 1)
        nbytes = (units * kept * self.layers + inner) * itemsize + dropout * math.ceil(inner / 8)
        return nbytes + (not self.is_packed) * _NUMBER_BYTES * self.batch

    def workspace_bytes(self, matrices: int, itemsize: int, training: bool) -> int:
        """Bytes that cuDNN works in, given the elements of all ``matrices``. In training they are the same forward and
        for both gradients:

        - all matrices once more: the LSTM's step begins with a kernel for each that transposes it. (The workspaces that
          were reported for that GRU differ by the matrices' bytes and no more where its input has other features.)
        - the output of all steps twice, as one layer's result and the next one's, and two states of each layer.
        - where sequences are not packed, input and output without padding (``CUDNN_RNN_PADDED_IO_ENABLED``) and their
          gradients, that of the input as wide as the wider; the states at both ends and their gradients; three numbers
          a sequence. (By so much the two workspaces of a plain network in cuDNN 7 differ, tensorflow/tensorflow#30889.)
        - gates of a group of steps for each layer and direction, forward and backward, where there are several groups.
        """
        ends, width = self.layers * self.directions * self.batch, self.width
        groups = sum(group for group in (FORWARD_STEPS, BACKWARD_STEPS)[:1 + training] if group < self.steps)
        elements = matrices + 2 * self.rows * width + ends * self.hidden * (GATES[self.mode] * groups + 2)
        if self.is_packed:
            return elements * itemsize
        states = 2 * ends * (self.output + (self.mode == LSTM) * self.hidden)
        elements += self.rows * (self.features + width) + states
        if training:
            elements += self.rows * (max(self.features, width) + width) + states
        return elements * itemsize + 3 * _NUMBER_BYTES * self.batch


def list_recurrent(signature: Signature) -> tuple[Inferred, ...]:
    """The workspaces of cuDNN in a call, in the order in which they are held; none of what is no recurrent layer."""
    packet = getattr(signature.op, "overloadpacket", None)
    if packet not in (_aten._cudnn_rnn, _aten._cudnn_rnn_backward):
        return ()
    named = signature.named_arguments()
    nbytes = _workspace_of(named)
    count = 1 + (packet is _aten._cudnn_rnn_backward and bool(named["output_mask"][3]))
    return (Inferred(nbytes, nbytes), ) * count


def _workspace_of(named: dict[str, Any]) -> int:
    matrices = sum(w.numel for w in named["weight"] if len(w) == 2)
    return RnnLayers.of_call(named).workspace_bytes(matrices, named["input"].dtype.itemsize, named["train"])


def _time_first(x: TensorSpec, named: dict[str, Any]) -> TensorSpec:
    if named["batch_sizes"] or not named["batch_first"]:
        return x
    (batch, steps, *rest), (batch_stride, step_stride, *strides) = x.shape, x.stride
    return TensorSpec.of((steps, batch, *rest), (step_stride, batch_stride, *strides), x.dtype, x.device)


def missing_gradients(named: dict[str, Any]) -> list[TensorSpec]:
    """Tensors like those of which a backward pass gets no gradient; zeros take its place."""
    return [named[like] for like, name in (("output", "grad_output"), ("hx", "grad_hy"), ("cx", "grad_cy"))
            if named[like] is not None and named[name] is None]


def copied_bytes(named: dict[str, Any]) -> tuple[int, int]:
    """Bytes of copies of the input and, in a backward pass, of the output's gradient, in which steps come first."""
    copied = copy_bytes(_time_first(named["input"], named))
    if "output" not in named:
        return copied, 0
    out, grad = named["output"], named["grad_output"]
    if grad is None:  # zeros_like(output, LEGACY_CONTIGUOUS_MEMORY_FORMAT)
        grad = TensorSpec.of(out.shape, tuple(math.prod(out[i + 1:]) for i in range(len(out))), out.dtype, out.device)
    return copied, copy_bytes(_time_first(grad, named))


@kernel_stages(_aten._cudnn_rnn)
def _forward(signature: Signature) -> tuple[Stage, ...]:
    """The input is made contiguous first; the workspace comes before what is reserved, the last of five outputs."""
    named = signature.named_arguments()
    return _filled(Stage(copied_bytes(named)[:1], 0, kept=True), Stage((_workspace_of(named),), 4, kept=True))


@kernel_stages(_aten._cudnn_rnn_backward)
def _backward(signature: Signature) -> tuple[Stage, ...]:
    """Gradients that are not there are zeros. ``_cudnn_rnn_backward_input`` makes input and gradient contiguous, and
    runs in any case; ``_cudnn_rnn_backward_weight`` does so with the input once more. cuDNN gives gradients of biases
    where there are none too, so those of the matrices are copied out of its buffer.
    """
    named = signature.named_arguments()
    missing = tuple(t.nbytes for t in missing_gradients(named))
    copied, workspace = copied_bytes(named), _workspace_of(named)
    gives_weights, has_biases = named["output_mask"][3], named["weight_stride0"] > 3
    stages = [Stage(missing, 0, kept=True), Stage((*copied, workspace), 3 if gives_weights else None)]
    if gives_weights and has_biases:
        stages.append(Stage((copied[0], workspace)))
    elif gives_weights:
        stages.append(Stage((copied[0], named["weight_buf"].nbytes, workspace), 3, kept=True))
    return _filled(*stages)


def _filled(*stages: Stage) -> tuple[Stage, ...]:
    filled = (stage._replace(blocks=tuple(b for b in stage.blocks if b)) for stage in stages)
    return tuple(stage for stage in filled if stage.blocks)
