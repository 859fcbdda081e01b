"""Which operators ``torch.autocast`` casts, and how. CUDA: the lists AT_FORALL_* of ``aten/src/ATen/autocast_mode.h``
and the registrations at AutocastCUDA in ``autocast_mode.cpp``; CPU: those at AutocastCPU there. Both of PyTorch 2.13,
with the overloads for named dimensions of earlier ones and what 2.14 casts besides (linalg_matrix_sqrth: observed on a
fake tensor); what a version lacks is left out, as the dispatcher tells.
"""
from __future__ import annotations

import torch

LOWER, FLOAT, FLOAT_IF_UNSET, FLOAT_APPENDED, WIDEST, BANNED = range(6)
"""What happens to an operator: its arguments cast to the region's dtype, or to float32; its ``dtype`` set to float32
where the caller gave none, or appended; its arguments cast to the widest among them; or it is refused."""

_CUDA = {
    LOWER: """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv
        linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
        _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
        scaled_dot_product_attention cudnn_convolution cudnn_convolution_transpose""",
    FLOAT: """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
        nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
        hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
        multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
        dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
        _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth""",
    FLOAT_IF_UNSET: """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
        linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList softmax.Dimname log_softmax.Dimname
        cumprod.dimname cumsum.dimname prod.dim_Dimname sum.dim_DimnameList""",
    FLOAT_APPENDED: "norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim",
    WIDEST: "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    BANNED: "binary_cross_entropy",
}
# All others that AutocastCPU has run in float32.
_CPU = {
    LOWER: """conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot baddbmm addmm
        _addmm_activation addbmm linear _convolution.deprecated matmul conv_tbc mkldnn_rnn_layer conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input prelu scaled_dot_product_attention
        _native_multi_head_attention""",
    WIDEST: "stack cat index_copy index_copy.dimname",
}
APPENDED = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
            "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype"}
"""The overload with a dtype that stands in for one without."""

Policies = dict[str, dict[str, int]]


def _registered(key: str) -> set[str]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")
            and has(n, key)}


def read_policies() -> Policies:
    """Operator ("softmax.int") to policy, by the type of device: "cuda" or "cpu".

    >>> policies = read_policies()
    >>> cuda, cpu = policies["cuda"], policies["cpu"]
    >>> cuda["linear"] == LOWER, cuda["softmax.int"] == FLOAT_IF_UNSET, cpu["mse_loss"] == FLOAT
    (True, True, True)
    """
    on_cuda, on_cpu = _registered("AutocastCUDA"), _registered("AutocastCPU")
    cuda = {name: policy for policy, names in _CUDA.items() for name in names.split() if name in on_cuda}
    named = {name: policy for policy, names in _CPU.items() for name in names.split()}
    return {"cuda": cuda, "cpu": {name: named.get(name, FLOAT) for name in on_cpu}}
