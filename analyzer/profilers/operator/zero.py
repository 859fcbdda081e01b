"""Operators that do no floating-point arithmetic, with the reason for each group.

In-place, out and `_copy` variants follow their operator. An operator that does arithmetic only on floating-point
tensors needs no place here: a call in which every tensor is integer or boolean counts zero by its dtypes.
"""
from __future__ import annotations

#: Reason → names of operators in the ``aten`` namespace (and, by the same name, ``prims``).
ZERO_FLOP_OPS = {
    "a view, or a change of a tensor's metadata": """
        alias as_strided _conj _neg_view detach diagonal expand expand_as lift narrow permute _reshape_alias select
        slice split split_with_sizes squeeze t transpose unbind unfold unsqueeze unsafe_split
        unsafe_split_with_sizes _unsafe_view view view_as view_as_complex view_as_real real imag _fw_primal
        _make_dual _unpack_dual reshape flatten unflatten swapaxes swapdims movedim moveaxis mT mH numpy_T adjoint
        matrix_H values indices crow_indices col_indices ccol_indices row_indices _values _indices slice_inverse
        _nested_view_from_buffer _nested_view_from_jagged _nested_get_values _nested_get_offsets _nested_get_lengths
        _nested_get_max_seqlen _nested_get_min_seqlen _nested_get_jagged_dummy _test_autograd_multiple_dispatch_view
        chunk tensor_split hsplit vsplit dsplit data atleast_1d atleast_2d atleast_3d ravel contiguous positive set
        set_data resize resize_as _resize_output _mkldnn_transpose _mkldnn_reshape _reshape_copy broadcast_to
        view_of view_of_dtype broadcast_in_dim collapse_view collapse split_dim requires_grad_ retain_grad conj
        resolve_conj resolve_neg _lazy_clone _sparse_broadcast_to shallow_copy_data""",
    "copies, casts, pads or rearranges elements": """
        clone copy _copy_from _copy_from_and_resize _to_copy to to_dense _to_dense _to_cpu cat concat stack _stack
        hstack vstack dstack block_diag repeat repeat_interleave tile roll rot90 flip channel_shuffle
        native_channel_shuffle pixel_shuffle pixel_unshuffle constant_pad_nd pad reflection_pad1d reflection_pad2d
        reflection_pad3d replication_pad1d replication_pad2d replication_pad3d im2col tril triu diag_embed
        diagonal_scatter select_scatter slice_scatter as_strided_scatter diagonal_backward select_backward
        slice_backward narrow_copy complex upsample_nearest1d upsample_nearest2d upsample_nearest3d
        _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d max_unpool2d max_unpool3d
        to_mkldnn to_padded_tensor _chunk_cat mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight
        _cudnn_rnn_flatten_weight _pin_memory copy_sparse_to_sparse _pack_padded_sequence _nested_from_padded
        _nested_from_padded_and_nested_example _nested_from_padded_tensor _nested_select_backward
        _nested_sum_backward _nested_tensor_from_mask _nested_tensor_from_mask_left_aligned
        _nested_tensor_from_tensor_list _jagged_to_padded_dense_forward _padded_dense_to_jagged_forward lu_unpack
        _spdiags convert_element_type device_put copy_strided copy_to rev type_as unflatten_dense_tensors
        flatten_dense_tensors _convert_weight_to_int4pack _convert_weight_to_int4pack_for_cpu
        _dyn_quant_pack_4bit_weight int_repr q_per_channel_scales q_per_channel_zero_points
        _make_per_channel_quantized_tensor _make_per_tensor_quantized_tensor _cslt_compress
        _sparse_semi_structured_tile _sparse_semi_structured_apply _sparse_semi_structured_apply_dense
        _to_sparse_semi_structured inductor_force_stride_order""",
    "addresses elements by index or mask": """
        embedding gather index index_select index_copy index_fill take take_along_dim masked_fill masked_select
        masked_scatter masked_scatter_backward _unsafe_index _unsafe_masked_index where nonzero nonzero_static
        argwhere tril_indices triu_indices""",
    "makes a tensor of constants or of nothing": """
        empty empty_like empty_strided empty_permuted empty_quantized _empty_affine_quantized
        _empty_per_channel_affine_quantized new_empty new_empty_strided new_full new_ones new_zeros zeros zeros_like
        ones ones_like full full_like fill zero eye scalar_tensor from_file _efficientzerotensor
        _new_zeros_with_same_feature_meta lift_fresh _cudnn_init_dropout_state _make_dep_token _make_token
        _sink_tokens iota fill_diagonal maximum_value minimum_value inductor_seed inductor_seeds
        inductor_lookup_seed inductor_rand_eager_offset inductor_rand_eager_offsets""",
    "works on integers or on bits (random integers among them)": """
        __and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__ bitwise_and
        bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift gcd lcm shift_left
        shift_right_arithmetic xor_sum randint randint_like inductor_randint
        _low_memory_max_pool_offsets_to_indices randperm random _fill_mem_eff_dropout_mask
        _philox_key_fold_in _philox_key_split hash_tensor _convert_indices_from_coo_to_csr
        _convert_indices_from_csr_to_coo _nested_compute_contiguous_strides_offsets _nested_tensor_size
        _nested_tensor_strides _nested_tensor_storage_offsets""",
    "compares into booleans": """
        eq ne lt le gt ge equal less less_equal greater greater_equal not_equal logical_and logical_or logical_xor
        logical_not isnan isinf isfinite isneginf isposinf isreal isin signbit any all count_nonzero _is_all_true
        _is_any_true is_nonzero unique_consecutive unique_dim_consecutive""",
    "chooses between values: the convention counts no comparison that only selects": """
        heaviside nan_to_num threshold threshold_backward hardtanh_backward hardshrink hardshrink_backward
        softshrink_backward fake_quantize_per_tensor_affine_cachemask_backward
        fake_quantize_per_channel_affine_cachemask_backward""",
    "reads or asserts a value, or asks for metadata": """
        _local_scalar_dense item _assert_async _assert_tensor_metadata _functional_assert_async
        _functional_assert_scalar _functional_sym_constrain_range _functional_sym_constrain_range_for_size
        sym_constrain_range sym_constrain_range_for_size sym_size sym_stride sym_numel sym_storage_offset size
        stride numel dim is_contiguous is_same_size record_stream _has_same_storage_numel is_pinned dense_dim
        sparse_dim _nnz _dimI _dimV is_coalesced _is_zerotensor _linalg_check_errors""",
    "builds or reorders a sparse tensor": """
        sparse_coo_tensor sparse_compressed_tensor _sparse_coo_tensor_with_dims
        _sparse_coo_tensor_with_dims_and_tensors _sparse_compressed_tensor_with_dims _to_sparse _to_sparse_csr
        _to_sparse_csc _to_sparse_bsr _to_sparse_bsc sparse_mask _sparse_mask_projection sparse_resize
        sparse_resize_and_clear resize_as_sparse _coalesced"""}

#: Namespaces none of whose operators is counted here. Collectives move data between devices: the communication profiler
#: counts their bytes, and the sums of a reducing one belong to it. `profiler` marks the regions of torch.profiler.
ZERO_FLOP_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "profiler",
                                  "fsdp"})

ZERO_FLOP_NAMES = frozenset(" ".join(ZERO_FLOP_OPS.values()).split())
