"""What a statement of a random program may be: templates, of which those that torch refuses are left out when drawn.

``{a} {b} {c}`` are tensors of floating point, ``{i}`` of integers, ``{m}`` of booleans; ``{d} {e}`` dimensions of
``{a}``, ``{n}`` a small number, ``{o}`` and ``{p}`` new names, ``{L}`` a new attribute, ``{M}`` a module that was made
before, ``{s}`` the sizes of ``{a}``.
"""
from __future__ import annotations


def _split(templates: str) -> list[str]:
    return [template for line in templates.strip().splitlines() for template in line.split(" ; ")]


VIEWS = _split("""
{a}.transpose({d}, {e}) ; {a}.view(-1) ; {a}.view({a}.shape[0], -1) ; {a}.reshape(-1, {a}.shape[-1])
{a}.reshape({a}.shape[0], -1) ; {a}.flatten({d}) ; {a}.unsqueeze({d}) ; {a}.squeeze() ; {a}.expand(2, *{a}.shape)
{a}[..., ::2] ; {a}[:, 1:] ; {a}[0] ; {a}[..., None] ; {a}[{a}.shape[0] - 1, ..., -1] ; {a}.narrow({d}, 0, 1)
{a}.select({d}, -1) ; {a}.chunk(2, {d})[1] ; {a}.split(1, {d})[0] ; {a}.unbind({d})[0] ; {a}.tensor_split(2, {d})[0]
{a}.permute(*reversed(range({a}.dim()))) ; {a}.diagonal() ; {a}.movedim(0, -1) ; {a}.unfold({d}, 2, 1)
{a}.as_strided((2, 2), (1, 2)) ; {a}.as_strided((2, 2), (1, 2), 1) ; {a}.view_as({b}) ; {a}.reshape_as({b}) ; {a}.mT
{a}.swapaxes(0, -1) ; {a}.detach() ; {a}.unflatten(-1, (2, -1)) ; {a}.unflatten({d}, (-1, 2))
torch.broadcast_to({a}, (2, *{a}.shape)) ; torch.atleast_3d({a}) ; torch.view_as_real(torch.view_as_complex({a}))
torch.broadcast_tensors({a}, {b})[0] ; torch.squeeze({a}, {d}) ; {a}.hsplit(2)[0] ; {a}.expand_as({b})
{a}.view(torch.int32).view(torch.float32) ; torch.meshgrid({a}.flatten()[:2], {b}.flatten()[:3], indexing="ij")[0]
{a}.data
""")

POINTWISE = _split("""
{a}.exp() ; {a}.sin() ; torch.tanh({a}) ; {a}.sigmoid() ; F.gelu({a}) ; F.gelu({a}, approximate="tanh") ; F.silu({a})
F.relu({a}) ; F.leaky_relu({a}, 0.1) ; F.elu({a}) ; F.softplus({a}) ; F.hardswish({a}) ; F.mish({a}) ; F.glu({a}, {d})
F.logsigmoid({a}) ; {a}.abs().sqrt() ; -{a} ; 1 / ({a} + 3) ; 2 - {a} ; {a} ** 2 ; {a} ** 0.5 ; {a} ** {b} ; {a} + {b}
{a} - {b} ; {a} * {b} ; {a} / {b} ; {a} + 1 ; {a} * 0.5 ; torch.add({a}, {b}, alpha=2) ; torch.maximum({a}, {b})
torch.where({m}, {a}, {b}) ; torch.where({a} > 0, {a}, 0.0) ; {a}.clamp(-1, 1) ; {a}.clamp(min={b})
torch.lerp({a}, {b}, 0.3) ; torch.addcmul({a}, {b}, {c}, value=0.5) ; torch.addcdiv({a}, {b}, {c} + 2)
{a}.masked_fill({m}, 0.0) ; {a}.masked_fill({a} > 0, -1.0) ; {a}.softmax({d}) ; {a}.log_softmax({d})
F.normalize({a}, dim={d}) ; F.layer_norm({a}, {a}.shape[-1:]) ; F.rms_norm({a}, {a}.shape[-1:]) ; F.group_norm({a}, 1)
F.dropout({a}, 0.3) ; F.dropout({a}, 0.3, self.training) ; F.dropout1d({a}, 0.3)
F.alpha_dropout({a}, 0.3, self.training) ; F.hardtanh({a}) ; F.threshold({a}, 0.1, 0.0) ; {a}.nan_to_num()
{a}.cumsum({d}) ; {a}.tril() ; {a}.triu(1) ; {a}.round() ; {a}.sign() * {b} ; torch.rand_like({a}) * {a}
{a} * torch.bernoulli(torch.full_like({a}, 0.5)) ; {a} + torch.randn({a}.shape[-1]) ; {a} * torch.arange({a}.shape[-1])
{a} * torch.linspace(0, 1, {a}.shape[-1]) ; {a} + torch.zeros_like({b}) ; {a} + {a}.new_ones({a}.shape[-1])
{a}.clone() ; {a}.contiguous() ; {a}.contiguous(memory_format=torch.channels_last)
{a}.clone(memory_format=torch.contiguous_format) ; torch.hypot({a}, {b}) ; torch.atan2({a}, {b})
torch.xlogy({a}, {b}.abs() + 1) ; {a}.erf() ; {a}.log1p() ; {a}.expm1() ; {a}.rsqrt() ; {a}.reciprocal()
torch.fmod({a}, 0.7) ; torch.remainder({a}, 0.7) ; {a}.cumprod({d}) ; {a}.logcumsumexp({d}) ; {a}.cummax({d})[0]
{a}.renorm(2, 0, 1.0) ; torch.logaddexp({a}, {b})
""")

REDUCTIONS = _split("""
{a}.sum({d}) ; {a}.sum({d}, keepdim=True) ; {a}.mean({d}) ; {a}.mean(({d}, {e}), keepdim=True) ; {a}.mean() ; {a}.sum()
{a}.amax({d}) ; {a}.max({d})[0] ; {a}.max() ; {a}.min({d}, keepdim=True).values ; {a}.var({d})
{a}.var({d}, unbiased=False, keepdim=True) ; {a}.std({d}) ; {a}.norm() ; {a}.norm(dim={d})
torch.linalg.vector_norm({a}, dim={d}) ; {a}.logsumexp({d}) ; {a}.prod({d}) ; {a}.median({d}).values
torch.std_mean({a}, {d})[1] ; torch.aminmax({a}, dim={d}).max ; {a}.nansum({d}) ; F.mse_loss({a}, {b})
F.l1_loss({a}, {b}.detach(), reduction="sum") ; F.smooth_l1_loss({a}, {b}) ; F.huber_loss({a}, {b})
F.kl_div({a}.log_softmax(-1), {b}.softmax(-1), reduction="batchmean")
F.cross_entropy({a}.flatten(0, -2), torch.zeros({a}.shape[:-1].numel(), dtype=torch.long))
F.nll_loss({a}.flatten(0, -2).log_softmax(-1), torch.zeros({a}.shape[:-1].numel(), dtype=torch.long))
F.binary_cross_entropy_with_logits({a}, torch.zeros_like({a})) ; F.cosine_similarity({a}, {b}, dim=-1)
F.pairwise_distance({a}, {b}) ; torch.trapezoid({a}, dim={d}) ; {a}.diff(dim={d})
""")

PRODUCTS = _split("""
{a} @ {b} ; {a} @ {b}.mT ; {a}.mT @ {a} ; torch.einsum("...i,...j->...ij", {a}, {b})
torch.einsum("bij,bkj->bik", {a}, {b}) ; torch.einsum("bij->bji", {a}) ; torch.einsum("bij,bij->b", {a}, {a})
torch.bmm({a}, {b}.mT) ; torch.outer({a}.flatten(), {b}.flatten()[:4]) ; F.linear({a}, {b})
torch.tensordot({a}, {b}, 1) ; torch.cdist({a}, {b}) ; torch.baddbmm({c}, {a}, {b}.mT, beta=0.5)
torch.addmm({c}, {a}, {b}.mT) ; torch.mv({a}, {b}) ; torch.dot({a}.flatten(), {a}.flatten())
torch.kron({a}.flatten()[:2], {b}.flatten()[:3]) ; F.scaled_dot_product_attention({a}, {a}, {a})
F.scaled_dot_product_attention({a}, {b}, {b}, is_causal=True)
F.scaled_dot_product_attention({a}, {a}, {a}, attn_mask={m})
F.scaled_dot_product_attention(*[t[:, None] for t in ({a}, {b}, {b})])
F.scaled_dot_product_attention({a}, {a}, {a}, dropout_p=0.2) ; torch.matrix_power({a}.mT @ {a}, 2)
torch.linalg.multi_dot([{a}.flatten(1), {a}.flatten(1).T, {a}.flatten(1)])
""")

ARRANGEMENTS = _split("""
torch.cat([{a}, {b}], {d}) ; torch.cat([{a}, {a}], {d}) ; torch.stack([{a}, {b}], {d}) ; torch.stack([{a}, {a}, {a}])
torch.hstack([{a}, {b}]) ; F.pad({a}, (1, 1)) ; F.pad({a}, (1, 1), mode="reflect") ; F.pad({a}, (1, 0, 0, 1), value=2.0)
{a}.roll(1, {d}) ; {a}.flip({d}) ; {a}.repeat(2, *[1] * ({a}.dim() - 1)) ; {a}.repeat_interleave(2, {d}) ; {a}.tile(2)
{a}.gather({d}, torch.zeros_like({a}, dtype=torch.long)) ; {a}.index_select({d}, torch.arange({a}.shape[{d}]))
{a}.index_select({d}, torch.zeros(3, dtype=torch.long)) ; {a}[torch.tensor([0, 1, 0])]
{a}[:, torch.arange({a}.shape[1])] ; {a}[[0, 1], ..., 0] ; {a}.take_along_dim({a}.argsort({d}), {d}) ; {a}.sort({d})[0]
{a}.topk(1, {d})[0] ; {a}.kthvalue(1, {d})[0] ; {a}.scatter({d}, torch.zeros_like({a}, dtype=torch.long), {b})
{a}.scatter_add({d}, torch.zeros_like({a}, dtype=torch.long), {b})
{a}.index_add(0, torch.zeros({b}.shape[0], dtype=torch.long), {b}) ; {a}.index_fill(0, torch.tensor([0]), 1.0)
{a}.select_scatter({b}, {d}, 0) ; {a}.slice_scatter({b}, {d}, 0, 1) ; {a}.rot90() ; {a}.movedim(0, -1).contiguous()
torch.block_diag({a}.flatten(1), {b}.flatten(1)) ; F.interpolate({a}, scale_factor=2)
F.interpolate({a}, size={n}, mode="linear") ; F.avg_pool1d({a}, 2) ; F.max_pool1d({a}.contiguous(), 2)
F.max_pool1d({a}.contiguous(), 3, stride=1, padding=1) ; F.adaptive_avg_pool1d({a}, 2)
F.adaptive_max_pool1d({a}.contiguous(), 1) ; F.avg_pool2d({a}, 2, ceil_mode=True) ; F.max_pool2d({a}, 2)
F.adaptive_avg_pool2d({a}, (1, 2)) ; F.lp_pool1d({a}, 2, 2) ; F.pixel_unshuffle({a}[:, None], 2) ; F.conv1d({a}, {b})
F.embedding({i} % {a}.shape[0], {a}) ; F.embedding_bag(torch.zeros(2, 2, dtype=torch.long), {a}, mode="mean")
F.grid_sample({a}[None], torch.zeros(1, 2, 2, 2), align_corners=False) ; torch.combinations({a}.flatten()[:3])
torch.fft.rfft({a}).abs() ; torch.fft.ifft(torch.fft.fft({a})).real ; torch.stack({a}.unbind({d}))
torch.cat({a}.chunk(2, {d})[::-1], {d}) ; sum({a}.unbind({d}))
""")

CASTS = _split("""
{a}.double() ; {a}.float() ; {a}.bfloat16() ; {a}.half() ; {a}.to(torch.float64) ; {a}.to({b}.dtype) ; {a}.type_as({b})
{a}.to({b}) ; {a} + {i} ; {a} * {m} ; {a}.to(torch.float32, copy=True) ; {a}.bfloat16().float() ; {i}.float()
({a} > {b}).float() ; {a}.to("cpu") ; {a}.cpu()
""")

INTEGERS = _split("""
{a}.argmax({d}) ; {a}.argsort({d}) ; {a}.sign().long() ; {i} + 1 ; {i} // 2 ; {i} * 2 % 3 ; torch.arange({a}.shape[{d}])
torch.zeros({a}.shape[0], dtype=torch.long) ; torch.cumsum({i}, 0) ; {i}.flatten() ; torch.tensor({s})
torch.bucketize({a}, torch.linspace(0, 1, 4))
""")

BOOLEANS = _split("""
{a} > 0 ; {a} <= {b} ; {i} == 1 ; ~{m} ; {m} & ({a} > 0) ; torch.ones({a}.shape, dtype=torch.bool).tril() ; {a}.isnan()
torch.arange({a}.shape[-1]) < 2 ; torch.isclose({a}, {b}) ; {a} != 0
""")

WRITES = _split("""
{a}.add_(1) ; {a}.mul_(0.5) ; {a}.add_({b}) ; {a}.mul_({b}) ; {a}.add_({b}, alpha=2) ; {a}.sub_({b}.detach())
{a} += {b} ; {a} *= 2 ; {a} -= 1 ; {a}.relu_() ; {a}.sigmoid_() ; {a}.tanh_() ; {a}.exp_() ; {a}.clamp_(min=0)
{a}.clamp_(-1, 1) ; {a}.zero_() ; {a}.fill_(0.5) ; {a}.copy_({b}) ; {a}.neg_() ; {a}[0] = 0 ; {a}[0] = {b}[0]
{a}[:, 0] = 1.5 ; {a}[..., ::2] += 1 ; {a}[..., -1] = {b}[..., -1] ; {a}[:, ...][{a} > 0] = 0.0
{a}[torch.tensor([0])] = 1.0 ; {a}.masked_fill_({a} > 1, 0.0) ; {a}.masked_fill_({m}, 0.0) ; {a}.transpose_(0, 1)
{a}.unsqueeze_(0) ; {a}.squeeze_() ; {a}.t_() ; {a}.swapaxes_(0, -1)
{a}.index_add_(0, torch.tensor([0]), {a}[:1].clone()) ; {a}.index_fill_(0, torch.tensor([0]), 2.0)
{a}.index_copy_(0, torch.tensor([0]), {a}[:1].detach())
{a}.scatter_({d}, torch.zeros_like({a}, dtype=torch.long), 1.0) ; {a}.addcmul_({b}, {c}) ; {a}.lerp_({b}, 0.5)
{a}.cumsum_({d}) ; {a}.tril_() ; {a}.uniform_() ; {a}.normal_(0, 0.1) ; {a}.bernoulli_(0.5) ; {a}.pow_(2)
{a}.div_({b}.abs() + 1) ; {a}.view(-1).add_(1) ; {a}.transpose(0, 1).mul_(2) ; {a}.detach().mul_(0.9) ; {a}.data.add_(1)
F.relu({a}, inplace=True) ; F.dropout({a}, 0.3, True, inplace=True) ; F.silu({a}, inplace=True)
F.hardtanh({a}, inplace=True) ; F.leaky_relu({a}, 0.1, inplace=True) ; {a}.requires_grad_() ; {a}.set_({b}.detach())
{a}.swapdims_(0, 1) ; {i}.add_(1) ; {m}.logical_not_()
""")

#: (a statement of ``__init__``, the call); a layer fits where the sizes do
LAYERS = [tuple(layer.split(" | ")) for layer in _split("""
nn.Linear({s}[-1], {n}) | {L}({a}) ; nn.Linear({s}[-1], {s}[-1], bias=False) | {L}({a})
nn.Linear({s}[-1], 2 * {s}[-1]) | {L}({a}).relu() ; nn.LayerNorm({s}[-1]) | {L}({a}) ; nn.LayerNorm({s}[-2:]) | {L}({a})
nn.RMSNorm({s}[-1]) | {L}({a}) ; nn.GroupNorm(1, {s}[1]) | {L}({a}) ; nn.BatchNorm1d({s}[1]) | {L}({a})
nn.BatchNorm1d({s}[1], momentum=None) | {L}({a}) ; nn.BatchNorm1d({s}[1], track_running_stats=False) | {L}({a})
nn.BatchNorm2d({s}[1]) | {L}({a}) ; nn.InstanceNorm1d({s}[1], affine=True) | {L}({a})
nn.Conv1d({s}[1], {n}, 3, padding=1) | {L}({a}) ; nn.Conv1d({s}[1], {s}[1], 3, padding=1, groups={s}[1]) | {L}({a})
nn.Conv1d({s}[1], {n}, 2, stride=2, bias=False) | {L}({a}) ; nn.Conv1d({s}[1], {n}, 3, padding=2, dilation=2) | {L}({a})
nn.Conv1d({s}[1], {n}, 3, padding="same", padding_mode="circular") | {L}({a})
nn.Conv2d({s}[1], {n}, 3, padding=1) | {L}({a}) ; nn.Conv2d({s}[1], {n}, 1) | {L}({a})
nn.Conv2d({s}[1], {n}, 3, padding=1).to(memory_format=torch.channels_last) | {L}({a})
nn.Conv2d(1, {n}, 3, padding=1) | {L}({a}[:, None].contiguous())
nn.ConvTranspose1d({s}[1], {n}, 2, stride=2) | {L}({a}) ; nn.GRU({s}[-1], {n}, batch_first=True) | {L}({a})[0]
nn.GRU({s}[-1], {n}, bidirectional=True) | {L}({a})[0] ; nn.LSTM({s}[-1], {n}, batch_first=True) | {L}({a})[1][0]
nn.LSTM({s}[-1], {n}, num_layers=2, dropout=0.1) | {L}({a})[0] ; nn.RNN({s}[-1], {n}) | {L}({a})[0]
nn.GRUCell({s}[-1], {n}) | {L}({a}) ; nn.LSTMCell({s}[-1], {n}) | {L}({a})[0]
nn.MultiheadAttention({s}[-1], 1, batch_first=True) | {L}({a}, {a}, {a})[0]
nn.MultiheadAttention({s}[-1], 2, batch_first=True) | {L}({a}, {a}, {a}, need_weights=False)[0]
nn.MultiheadAttention({s}[-1], 1) | {L}({a}, {a}, {a}, average_attn_weights=False)[0]
nn.TransformerEncoderLayer({s}[-1], 1, 8, batch_first=True) | {L}({a})
nn.TransformerEncoderLayer({s}[-1], 2, 8, activation="gelu", norm_first=True) | {L}({a})
nn.Embedding(16, {n}) | {L}({i}.abs() % 16) ; nn.Embedding(16, {n}, padding_idx=0) | {L}({i}.abs() % 16)
nn.EmbeddingBag(16, {n}) | {L}(({i}.abs() % 16).reshape(1, -1)) ; nn.PReLU() | {L}({a}) ; nn.Dropout(0.2) | {L}({a})
nn.ReLU(inplace=True) | {L}({a}) ; nn.SiLU() | {L}({a}) ; nn.Softmax(-1) | {L}({a})
nn.Bilinear({s}[-1], {s}[-1], {n}) | {L}({a}, {a})
nn.Sequential(nn.Linear({s}[-1], 8), nn.GELU(), nn.Linear(8, {s}[-1])) | {L}({a}) + {a}
nn.ModuleList(nn.Linear({s}[-1], {s}[-1]) for _ in range(2)) | {L}[1]({L}[0]({a}))
nn.ModuleDict(dict(up=nn.Linear({s}[-1], 4), down=nn.Linear(4, {s}[-1]))) | {L}["down"](F.silu({L}["up"]({a})))
nn.AvgPool1d(2) | {L}({a}) ; nn.MaxPool1d(2) | {L}({a}.contiguous()) ; nn.AdaptiveAvgPool1d(1) | {L}({a})
nn.Upsample(scale_factor=2) | {L}({a}) ; nn.Flatten() | {L}({a}) ; nn.LocalResponseNorm(2) | {L}({a})
nn.CosineSimilarity(-1) | {L}({a}, {a} + 1) ; nn.utils.parametrizations.weight_norm(nn.Linear({s}[-1], {n})) | {L}({a})
nn.utils.parametrizations.spectral_norm(nn.Linear({s}[-1], {n})) | {L}({a})
nn.utils.parametrizations.orthogonal(nn.Linear({s}[-1], {s}[-1])) | {L}({a})
nn.utils.weight_norm(nn.Linear({s}[-1], {n})) | {L}({a}) ; nn.Parameter(torch.ones({s}[-1])) | {a} * {L}
nn.Parameter(torch.ones({s}[-1], 2)) | {a} @ {L} @ {L}.T
nn.Parameter(torch.ones({s}[-1], {s}[-1])) | F.linear({a}, {L}.tril())
nn.ParameterList([torch.ones({s}[-1]) for _ in range(2)]) | {a} * {L}[0] + {L}[1]
nn.Linear({s}[-1], {s}[-1]).requires_grad_(False) | {L}({a}) ; nn.Linear({s}[-1], {s}[-1]).double() | {L}({a}.double())
nn.Linear({s}[-1], {s}[-1]).bfloat16() | {L}({a}.bfloat16()) ; LowRank(nn.Linear({s}[-1], {s}[-1])) | {L}({a})
Gate({s}[-1]) | {L}({a}) ; Routed({s}[-1]) | {L}({a})
""")]

#: whole statements, of several lines or in a region
BLOCKS = [block.strip("\n") for block in """
if {a}.shape[{d}] > 2:
    {o} = {a} * 2
else:
    {o} = {a}.exp()
---
if {a}.dim() == 3 and {a}.is_contiguous():
    {o} = {a}.relu()
else:
    {o} = {a}.sigmoid()
---
if {a}.stride(0) > 4:
    {o} = {a} + 1
else:
    {o} = {a}.clone()
---
if torch.arange({a}.shape[0]).sum() > 1:
    {o} = {a}.sin()
else:
    {o} = {a}.cos()
---
{o} = {a}
for size in {a}.shape:
    {o} = {o} * size
---
{o} = {a}
for part in {a}.unbind(0):
    {o} = {o} + part
---
{o} = [t * 2 for t in {a}.chunk(2, {d})][0]
---
{o}, {p} = {a}.chunk(2, {d})
---
{o}, {p} = {a}.max({d})
---
{o}, *{p} = {a}.unbind({d})
{p} = {a}
---
with torch.no_grad():
    {o} = {a} * 2
{p} = {o} + {b}
---
with torch.no_grad():
    {a}.mul_(0.9)
---
with torch.no_grad():
    {o} = {a}.transpose(0, 1)
{p} = {o} * {b}
---
with torch.enable_grad():
    {o} = {a}.detach().requires_grad_() * 2
---
with torch.autocast("cpu", dtype=torch.bfloat16):
    {o} = {a} @ {a}.mT
---
with torch.autocast("cpu", dtype=torch.bfloat16):
    {o} = F.linear({a}, {a}.reshape(-1, {a}.shape[-1]))
    {p} = {o}.softmax(-1)
---
with torch.autocast("cpu", dtype=torch.bfloat16):
    {o} = {M}({a})
---
with torch.autocast("cpu", enabled=False):
    {o} = {M}({a}.float())
---
{o} = {M}({a})
---
{o} = {M}({M}({a}))
---
{o} = checkpoint({M}, {a}, use_reentrant=False)
---
{o} = checkpoint({M}, {a}, use_reentrant=True)
---
{o} = checkpoint(lambda t: {M}(t).tanh(), {a}, use_reentrant=False)
---
{o} = checkpoint(lambda t, u: (t * u).sin().exp(), {a}, {b}, use_reentrant=False)
---
{o} = checkpoint(lambda t: F.dropout(t.exp(), 0.5), {a}, use_reentrant=True)
---
{o}, {p} = checkpoint(lambda t: (t.sin(), t.cos().exp()), {a}, use_reentrant=False)
---
{o} = checkpoint(lambda t: checkpoint(torch.sin, t.exp(), use_reentrant=False), {a}, use_reentrant=False)
---
{o} = Double.apply({a})
---
{o} = SavesBoth.apply({a}, {b})
---
{o} = KeepsOnContext.apply({a})
---
{o}, {p} = TwoResults.apply({a})
---
{o} = WritesInPlace.apply({a}.clone())
---
if {a}.requires_grad:
    {a}.register_hook(lambda g: g * 2)
{o} = {a} * {b}
---
{o} = {a} * 3
if {o}.requires_grad:
    {o}.retain_grad()
{p} = {o}.exp()
---
cache.append({a})
{o} = {a} + cache[0].mean()
---
cache.append({a}.detach())
if len(cache) > 1:
    {o} = {a} * cache.pop(0).sum()
else:
    {o} = {a} * 2
---
box["last"] = {a} * 2
{o} = box["last"] + 1
---
{o} = put(box, {a})
{p} = box.pop("put")
---
self.last = {a}.detach()
{o} = {a} + self.last
---
self.count = getattr(self, "count", 0) + 1
{o} = {a} * self.count
---
{o} = Pair({a}, {b}).left * 2
---
{o} = Pair({a} * 2, [{b}, {a} + 1]).right[1]
---
{o} = dict(one={a} * 2, two=[{b}])["one"]
---
{o} = functools.reduce(torch.add, [{a}, {a}, {a}])
---
{o} = {a}.clone()
{o}[0] = {b}[0]
---
{o} = torch.zeros_like({a})
{o}[0] = {a}[0] * 2
{p} = {o}.exp()
---
{o} = torch.empty_like({a})
{o}.copy_({a} * 2)
---
{o} = torch.zeros({a}.shape[0], 8)
{o}[:, :{a}.shape[1]] = {a}.flatten(1)[:, :8]
---
{o} = {a}.new_zeros(*{a}.shape, 2)
{o}[..., 0] = {a}
{o}[..., 1] = {a} * {a}
---
{o} = {a}.exp()
{p} = {o}.view(-1)
{p}.mul_(2)
---
{o} = {a} * 2
{p} = {o}.transpose(0, -1)
{o}.add_(1)
---
{o} = ({a} * 2).detach()
{o}.requires_grad_()
---
total = ({a} * {a}).sum()
{o} = torch.autograd.grad(total, {a}, create_graph=True)[0] if {a}.requires_grad else {a} * 2
---
total = ({a} * 3).exp().sum()
{o} = torch.autograd.grad(total, {a}, retain_graph=True)[0] if {a}.requires_grad else {a}
---
{o} = torch.func.grad(lambda t: (t * t).sum())({a})
---
{o} = torch.vmap(lambda t: t.sin() * 2)({a}[:, None])
---
with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
    {o} = {a}.exp() * {a}
---
{o} = {a} * torch.tensor(2.0)
---
{o} = {a} * torch.ones(()).item()
---
{o} = {a}[:int(torch.tensor([1, 2]).sum())]
---
{o} = torch.stack([{a}[index] for index in range({a}.shape[0])])
---
{o} = torch.utils.checkpoint.checkpoint_sequential([nn.Tanh(), nn.Sigmoid()], 2, {a}, use_reentrant=False)
---
assert {a}.shape == {a}.size() and not {a}.is_cuda
{o} = {a} * {a}.numel() + {a}.element_size()
---
{o} = {a}.apply_(lambda v: v) if False else {a} + 1
---
{o} = {a}
while {o}.numel() > 8:
    {o} = {o}[..., ::2] if {o}.shape[-1] > 1 else {o}[0]
---
{o} = {a} if {a}.requires_grad else {a}.clone().requires_grad_()
---
try:
    {o} = {a}.view(7, 11, 13)
except RuntimeError:
    {o} = {a}.reshape(-1)
""".split("\n---\n")]

#: what a statement of ``__init__`` does to a module ``{M}`` that was made
SETTINGS = _split("""
{M}.register_forward_hook(lambda module, args, output: output * 2)
{M}.register_forward_pre_hook(lambda module, args: (args[0] + 1, *args[1:]))
{M}.register_full_backward_hook(lambda module, ins, outs: tuple(g if g is None else g * 2 for g in ins))
{M}.register_full_backward_pre_hook(lambda module, outs: tuple(g if g is None else g * 2 for g in outs))
{M}.requires_grad_(False) ; {M}.eval() ; {M}.to(memory_format=torch.channels_last)
next({M}.parameters()).register_hook(lambda g: g + 1) ; {M}.weight.requires_grad_(False)
{M}.register_buffer("extra", torch.zeros(3)) ; self.tied = {M}
{M}.weight = nn.Parameter({M}.weight.detach().mT.contiguous().mT)
{M}.weight.register_post_accumulate_grad_hook(lambda p: None)
""")
