"""What CUDA convolutions hold while they run: copies that PyTorch makes, and cuDNN's workspace. PyTorch's part is read
from ``aten/src/ATen/native/Convolution.cpp`` and ``cudnn/ConvShared.cpp``; without ``cudnn.benchmark`` it takes the
first plan of cuDNN's heuristic that runs (``cudnn/Conv_v8.cpp``, ``try_configs``). cuDNN is closed: tensor cores want
channels last, so for other tensors it writes copies of input, output and weight into its workspace where the product is
worth them. The forms of these rules and the constants in `BRACKETED` come from what an H200 measured with cuDNN 9.19
(``benchmarks/truth``): most from peaks, those of `_copies_for_weight_gradient` from reserved bytes. Other versions and
devices may choose otherwise, so a profile tells what rests on them (`list_inferred`).
"""
from __future__ import annotations

import math
from typing import NamedTuple

import torch

from analyzer.hardware.catalogue import simulated_spec
from analyzer.meta.operator_info import Stage, kernel_stages
from analyzer.meta.spec import Signature, TensorSpec

from .kernel_temporary import is_contiguous
from .reduction import accumulate_bytes, reduction_blocks

_aten = torch.ops.aten

# In no source: chosen within what the measured cases of `benchmarks/truth` leave open, which `BRACKETED` tells.
_WORTH_COPYING = 25.0           # FLOPs per byte read and written by the copies, from which on they are made
_PRODUCT_WORTH_COPYING = 46.0   # the same of a 1x1 convolution of stride 1 in float32, a plain matrix product without,
# where an image's places are not whole 16 bytes, which a product must load at once
_RAGGED_PRODUCT_WORTH_COPYING = 97.0  # and where a count of channels is no multiple of 32
_WHOLE_PRODUCT_WORTH_COPYING = 150.0  # and where they are
_STRIDED_PRODUCT_WORTH_COPYING = 9.0  # the same of one of a greater stride
_STRIDED_GRADIENT_CHANNELS = 192  # channels of the input of such a one from which on its gradient is copied
_FEW_CHANNELS = 16              # up to which the gradient of an input is not copied
_SMALL_WEIGHT = 32              # places of a weight up to which an image of few channels in 16 bits is read as it lies
_VECTOR_CHANNELS = 8            # 16-bit channels in the 16 bytes that a thread loads at once
_TILE = 128                     # rows and columns of an output tile of the weight gradient's product
_TILE_BYTES = 4 * _TILE * _TILE
_DEPTHWISE_SUMS = 8             # partial sums of a depthwise layer's weight for an image, of 7x7 to 56x56 alike
_SUM_BYTES = 4
_GOOD_WAVE = 0.9                # share of busy multiprocessors from which on a weight gradient is not split


class Bracketed(NamedTuple):
    """A constant of this file that measured cases lie around: what was seen below it, and from it on."""

    name: str
    low: float   #: the nearest measured layer below, which is run the one way
    high: float  #: the nearest measured layer above, which is run the other way
    cases: str   #: the layers, and the models of `benchmarks/truth` whose measured peaks show them


BRACKETED = (
    Bracketed("_WORTH_COPYING", 21.3, 30.9, "bracketed by measured peaks of resnet18, resnet50 and resnet152 in "
              "float32: 1x1 of stride 2 (21.3) is run as it is, as 3x3 of stride 2 over 3 channels of squeezenet1_1 "
              "(5.7); 7x7 of stride 2 over 3 channels (30.9) is copied, as 3x3 of vgg16 (72)"),
    Bracketed("_PRODUCT_WORTH_COPYING", 34.3, 62.6, "bracketed by measured peaks of mobilenet_v3_large (34.3, run as "
              "it is) and efficientnet_b0 (62.6, copied) in float32"),
    Bracketed("_RAGGED_PRODUCT_WORTH_COPYING", 84.7, 111.0, "bracketed by measured peaks of squeezenet1_1 (84.7, as it "
              "is) and regnet_y_1_6gf (111.0, copied) in float32"),
    Bracketed("_WHOLE_PRODUCT_WORTH_COPYING", 128.0, 170.7, "1,024 channels at 14x14 (128.0) measured on an H200 as "
              "they are; bracketed by the measured peak of deeplabv3_resnet50, which copies 1,024 to 2,048 (170.7)"),
    Bracketed("_STRIDED_PRODUCT_WORTH_COPYING", 8.0, 10.7, "measured on an H200: 64 to 256 channels at 112x112 (8.0) "
              "run as they are, 128 to 256 at 56x56 (10.7) are copied"),
    Bracketed("_STRIDED_GRADIENT_CHANNELS", 128, 256, "measured on an H200, at 14x14 to 56x56 and 16 to 128 images"),
    Bracketed("_FEW_CHANNELS", 3, 64, "measured on an H200: first layers of 3x3 to 16x16 weights are not copied"),
    Bracketed("_SMALL_WEIGHT", 16, 49, "measured on an H200: weights of 3x3 and 4x4 of stride 2 and 4 read images as "
              "they lie, 7x7, 11x11 and 16x16 padded ones"),
    Bracketed("_VECTOR_CHANNELS", 4, 16, "3 channels become 8 by measured peaks of vit_b_16 and vit_hf in bfloat16"),
    Bracketed("_TILE", 64, 256, "by measured peaks of weight gradients in float32; 128 is a usual tile"),
    Bracketed("_GOOD_WAVE", 0.55, 0.97, "bracketed by measured peaks of weight gradients of convolutions in float32: a "
              "wave that is 0.97 full is run as it is, one of 0.55 is split"),
)
"""All constants of `cuda/workspaces` that are read from no source, for a benchmark that leaves models out of them."""


def _has_tensor_cores(dtype: torch.dtype) -> bool:
    capability = simulated_spec().compute_capability or (0, 0)
    if dtype == torch.float32:
        return capability >= (8, 0) and torch.backends.cudnn.allow_tf32
    return dtype == torch.bfloat16 and capability >= (8, 0) or dtype == torch.float16 and capability >= (7, 0)


def _is_channels_last(t: TensorSpec) -> bool:
    """c10/core/MemoryFormat.h, suggest_memory_format: whether strides of images or volumes are channels last."""
    if len(t) not in (4, 5) or t.stride[1] == 0:
        return False
    least = 0
    for d in (1, *range(len(t) - 1, 1, -1), 0):
        if t[d] == 0 or t.stride[d] < least or d == 0 and least == t.stride[1]:
            return False
        least = t.stride[d] * max(1, t[d])
    return True


def suggests_channels_last(x: TensorSpec, w: TensorSpec) -> bool:
    """``cudnn_conv_suggest_memory_format`` in ConvUtils.h."""
    return x.dtype != torch.float64 and either_is_channels_last(x, w)


def either_is_channels_last(x: TensorSpec, w: TensorSpec) -> bool:
    """Whether images or weights lie so, which the other functions there ask for as well."""
    return len(w) in (4, 5) and (_is_channels_last(x) or _is_channels_last(w))


def _is_contiguous(t: TensorSpec, channels_last: bool) -> bool:
    in_both = t[1] == 1 or math.prod(t[2:]) == 1  # orders: one channel, or one place
    return channels_last and _is_channels_last(t) or (not channels_last or in_both) and is_contiguous(t)


def _copy_bytes(t: TensorSpec) -> int:
    """Bytes of a channels-last copy: in 16 bits, whole vectors of channels (measured: 3 become 8 in two models)."""
    if t.dtype.itemsize != 2:
        return t.nbytes
    channels = t[1]
    return t.nbytes // channels * -(-channels // _VECTOR_CHANNELS) * _VECTOR_CHANNELS if channels else 0


class Inferred(NamedTuple):
    """A workspace of cuDNN's that is in no source: as predicted, and the most that a kernel of those known asks for."""

    nbytes: int
    most_bytes: int


class _Convolution:
    """One convolution of images ``x`` with weights ``w`` to ``y``, which holds the same in either direction."""

    def __init__(self, x: TensorSpec, y: TensorSpec, w: TensorSpec, stride: tuple[int, ...], groups: int,
                 transposed: bool) -> None:
        self.x, self.y, self.w, self.groups = x, y, w, groups
        self.channels_last = suggests_channels_last(x, w)
        is_one_each = groups > 1 and groups == x[1] and w[0] % x[1] == 0
        # use_cudnn_depthwise in Convolution.cpp: where channels are last cuDNN runs it, else PyTorch (but see float16)
        self.is_depthwise = is_one_each and not transposed and not self.channels_last
        self.is_last_depthwise = (is_one_each and w[0] == x[1] and not transposed and self.channels_last and len(w) == 4
                                  and x.dtype.itemsize == 2 and torch.backends.cudnn.enabled)
        is_point = groups == 1 and math.prod(w[2:]) == 1
        self.is_product, self.is_strided = is_point and set(stride) == {1}, set(stride) != {1}
        self.is_strided_product = is_point and self.is_strided and x.dtype == torch.float32
        self.uses_copies = self._are_copies_worth()

    def contiguous_copies(self, *tensors: TensorSpec) -> tuple[int, ...]:
        """Bytes of the copies that PyTorch makes of tensors that are not in the order chosen."""
        return tuple(t.nbytes for t in tensors if t.numel and not _is_contiguous(t, self.channels_last))

    def _has_choice(self) -> bool:
        """Whether cuDNN runs it with channels first, and could copy them to be last for its tensor cores."""
        uses_tensor_cores = torch.backends.cudnn.enabled and _has_tensor_cores(self.x.dtype)
        return uses_tensor_cores and self.x.numel > 0 and not self.is_depthwise and not self.channels_last

    def _are_copies_worth(self) -> bool:
        if not self._has_choice():
            return False
        if self.groups > 1:
            return True  # without tensor cores there is no other kernel for groups that is not far slower
        flops = 2 * self.y.numel * self.w.numel // self.w[0]
        copied = 2 * (self.x.nbytes + self.y.nbytes)
        if self.is_strided_product:
            return flops >= _STRIDED_PRODUCT_WORTH_COPYING * copied
        if not self.is_product or self.x.dtype != torch.float32:
            return flops >= _WORTH_COPYING * copied
        if math.prod(self.x[2:]) % 4 == 0:
            return flops >= _WHOLE_PRODUCT_WORTH_COPYING * copied
        return flops >= (_RAGGED_PRODUCT_WORTH_COPYING if self._is_ragged else _PRODUCT_WORTH_COPYING) * copied

    @property
    def _is_ragged(self) -> bool:
        return bool(self.w[0] % 32 or self.w[1] % 32)

    @property
    def copy_bytes(self) -> int:
        """Copies in channels-last order, in which 1x1 weights are the same; those of groups are not (measured)."""
        weight_bytes = _copy_bytes(self.w) if math.prod(self.w[2:]) > 1 and self.groups == 1 else 0
        return _copy_bytes(self.x) + _copy_bytes(self.y) + weight_bytes

    @property
    def forward_bytes(self) -> int:
        """The workspace of the output."""
        if self.is_strided_product and self.uses_copies:  # measured: the largest write their output as it is asked for,
            return _copy_bytes(self.x)                    # some smaller ones copy it too
        if self.uses_copies:
            return self.copy_bytes
        reads_small = self.x[1] < _VECTOR_CHANNELS and self.is_strided and math.prod(self.w[2:]) <= _SMALL_WEIGHT
        return 0 if reads_small else self.padded_bytes

    @property
    def input_gradient_bytes(self) -> int:
        return self.copy_bytes if self._copies_for_input_gradient() else self.padded_bytes

    def _copies_for_input_gradient(self) -> bool:
        if self.is_strided_product and self._has_choice():
            return self.x[1] >= _STRIDED_GRADIENT_CHANNELS
        return self.uses_copies and (self.groups > 1 or self.x[1] > _FEW_CHANNELS)

    @property
    def padded_bytes(self) -> int:
        """Copies of 16-bit tensors in channels-last order with channels for whole vectors (nhwcAddPaddingKernel).

        Measured on an H200 with cuDNN 9.19, the first layer of ResNet-50 on 32 and 64 images: within 0.5 %.
        """
        if not self.channels_last or self.groups > 1 or self.x.dtype.itemsize != 2 or not _has_tensor_cores(
                self.x.dtype):
            return 0
        return sum(_copy_bytes(t) for t in (self.x, self.y, self.w) if t[1] % _VECTOR_CHANNELS)

    def infer(self, nbytes: int, of_weight: bool = False) -> Inferred:
        """A workspace of one direction: the most is with copies, and a partial tile on each multiprocessor."""
        if not self._has_choice():
            return Inferred(nbytes, nbytes)
        partial_bytes = _TILE_BYTES * (simulated_spec().multiprocessors or 0) if of_weight else 0
        return Inferred(nbytes, max(nbytes, self.copy_bytes + partial_bytes))

    @property
    def weight_gradient_bytes(self) -> int:
        """The workspace of the weight gradient, a sum over all images and places: copies, and partial sums."""
        if self.is_last_depthwise:  # wgrad2d_c1_k1_nhwc, measured in bfloat16 with 7x7 weights: 64 images by their
            # requested bytes, 128 (convnext_tiny of `benchmarks/truth`) by reserved ones
            return _DEPTHWISE_SUMS * self.x[0] * self.w.numel * _SUM_BYTES if self.x.numel else 0
        if not self._copies_for_weight_gradient():
            # a product per image, added up afterwards
            uses_tf32 = self.x.dtype == torch.float32 and _has_tensor_cores(torch.float32)
            return self.x[0] * self.w.nbytes if self.is_product and uses_tf32 else self.padded_bytes
        # 16-bit kernels of products of ragged channels write no partial sums (measured)
        splits = self.groups == 1 and (self.x.dtype == torch.float32 or not self.is_product or not self._is_ragged)
        return self.copy_bytes + (self.partial_bytes if splits else 0)

    def _copies_for_weight_gradient(self) -> bool:
        """In 16 bits no kernel for channels first sums over places; in float32 few products of ragged channels leave
        the device idle. Of ResNet-50's 1x1 layers, whose channels are whole, none copied for that on an H200.
        """
        if self.uses_copies or self.groups > 1 or not self._has_choice():
            return self.uses_copies
        if self.is_strided_product:
            return self._copies_for_input_gradient()
        if self.x.dtype != torch.float32:
            return not self.is_product
        multiprocessors = simulated_spec().multiprocessors
        return (self.is_product and self._is_ragged and math.prod(self.x[2:]) > 1 and multiprocessors is not None
                and self.x[0] * self._tiles < multiprocessors)

    @property
    def _tiles(self) -> int:
        return -(-self.w[0] // _TILE) * -(-(self.w.numel // self.w[0]) // _TILE)

    @property
    def partial_bytes(self) -> int:
        """Partial sums of the weight gradient where its product is split.

        Stream-K (Osama et al., PPoPP 2023): where a last wave of output tiles would leave multiprocessors idle, they
        share tiles, one partial tile each; few tiles are split evenly. A flag per tile.
        """
        multiprocessors, tiles = simulated_spec().multiprocessors, self._tiles
        if multiprocessors is None or tiles >= _GOOD_WAVE * -(-tiles // multiprocessors) * multiprocessors:
            return 0
        partial = tiles * (multiprocessors // tiles) if tiles < multiprocessors else multiprocessors
        return partial * _TILE_BYTES + 4 * tiles


def list_inferred(signature: Signature) -> tuple[Inferred, ...]:
    """The inferred workspaces of a call, in the order in which they are held; none of what is no convolution.

    >>> from analyzer.meta.spec import TensorSpec
    >>> x = TensorSpec.of((8, 64, 56, 56), (64 * 56 * 56, 56 * 56, 56, 1), torch.bfloat16, "cuda:0")
    >>> w = TensorSpec.of((64, 64, 3, 3), (64 * 9, 9, 3, 1), torch.bfloat16, "cuda:0")
    >>> args = x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    >>> list_inferred(Signature(_aten.convolution.default, args, {}, (x, w), (x,)))  # 2 bytes an element of all three
    (Inferred(nbytes=6496256, most_bytes=6496256),)
    """
    packet = getattr(signature.op, "overloadpacket", None)
    if packet is _aten.convolution:
        c = _convolution_of(signature)
        return (c.infer(c.forward_bytes),)
    if packet is not _aten.convolution_backward:
        return ()
    c, (wants_input, wants_weight, _) = _convolution_of(signature), signature.args[10]
    return (((c.infer(c.input_gradient_bytes),) if wants_input else ())
            + ((c.infer(c.weight_gradient_bytes, of_weight=True),) if wants_weight else ()))


def _convolution_of(signature: Signature) -> _Convolution:
    is_backward = signature.op.overloadpacket is _aten.convolution_backward
    y = signature.args[0] if is_backward else signature.outputs[0]
    x, w, _, stride, _, _, transposed, _, groups = signature.args[is_backward:][:9]
    images, result = (y, x) if transposed else (x, y)
    return _Convolution(images, result, w, tuple(stride), groups, transposed)


@kernel_stages(_aten.convolution)
def _forward(signature: Signature) -> tuple[Stage, ...]:
    x, w = signature.args[:2]
    c = _convolution_of(signature)
    # Convolution.cpp makes the input contiguous before the output is allocated, ConvShared.cpp the weight afterwards
    workspace = (c.forward_bytes,) if c.forward_bytes else ()
    return _filled(Stage(c.contiguous_copies(x), 0, kept=True), Stage(c.contiguous_copies(w) + workspace))


def _filled(*stages: Stage) -> tuple[Stage, ...]:
    return tuple(s for s in stages if s.blocks)


@kernel_stages(_aten.convolution_backward)
def _backward(signature: Signature) -> tuple[Stage, ...]:
    gy, x, w = signature.args[:3]
    wants_input, wants_weight, wants_bias = signature.args[10]
    c = _convolution_of(signature)
    # Convolution.cpp makes the input contiguous, and cudnn_convolution_backward converts a gradient of the other memory
    # format, for both gradients; one of this format that has gaps is copied for each of them.
    is_converted = _is_channels_last(gy) != c.channels_last
    copied = c.contiguous_copies(gy)
    kept = (c.contiguous_copies(x) if wants_weight else ()) + (copied if is_converted else ())
    copied = () if is_converted else copied
    stages = [Stage(kept, 0 if wants_input else 1 if wants_weight else 2, kept=True)]
    if wants_input:  # the two gradients run one after the other, each with its own workspace
        nbytes = c.input_gradient_bytes
        blocks = c.contiguous_copies(w) + copied + ((nbytes,) if nbytes else ())
        stages.append(Stage(blocks, 1 if wants_weight else 2 if wants_bias else None))
    if wants_weight:
        nbytes = c.weight_gradient_bytes
        stages += [Stage(copied, 1, kept=True), Stage((nbytes,) if nbytes else (), 2 if wants_bias else None)]
    if wants_bias:  # at::sum over all but the channels
        stages.append(Stage(reduction_blocks(gy, (0, *range(2, len(gy))), accumulate_bytes(gy.dtype))))
    return _filled(*stages)
