"""A GRPO loop beside vLLM on one 24 GB card, as the notes of grpo_4090 tell it; run dry by `benchmarks.accuracy.grpo`.

16 answers in groups of 4, old log probabilities of two rows at a time, then one optimizer step over 16 passes of a row
each, with the entropy of every token; weights and arithmetic in bfloat16, AdamW fused, no reference model.
"""
import argparse

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

MODEL = "Qwen/Qwen2.5-Math-1.5B"
PROMPTS, GROUP, NEW = 4, 4, 1024
# Tokens of a prompt, which the notes do not tell: the template r1_zero has some 100, a problem of MATH 30 to 200.
PROMPT = 205

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoints", action="store_true")
parser.add_argument("--model", default=MODEL)
options = parser.parse_args()


def score(ids: Tensor, labels: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log probabilities of labels, and the entropy of what was predicted."""
    logits = model(ids).logits
    each = log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if not with_entropy:
        return each, None
    with torch.no_grad():
        shares = logits - logits.logsumexp(-1, keepdim=True)
        return each, -(shares.exp() * shares).sum(-1)


engine = LLM(options.model, gpu_memory_utilization=0.2, dtype="bfloat16", enable_prefix_caching=True)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, device_map="cuda",
                                             attn_implementation="flash_attention_2")
if options.checkpoints:
    model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

for _ in range(10):
    asked = [{"prompt_token_ids": [100 + row] * PROMPT} for row in range(PROMPTS) for _ in range(GROUP)]
    given = engine.generate(asked, SamplingParams(temperature=1.0, max_tokens=NEW, min_tokens=4))
    rows = torch.tensor([one.prompt_token_ids + one.outputs[0].token_ids for one in given])
    ids, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    is_answer = torch.zeros_like(labels, dtype=torch.bool)
    is_answer[:, PROMPT - 1:] = True
    advantages = torch.randn(len(rows), 1)

    model.eval()
    found = []
    for two in range(0, len(rows), 2):
        own, follow = ids[two:two + 2].cuda(), labels[two:two + 2].cuda()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            found.append(score(own, follow, False)[0])
    old = torch.cat(found).cpu()
    del found, own, follow
    torch.cuda.empty_cache()

    model.train()
    for row in range(len(rows)):
        own, follow, mask = (x[row:row + 1].cuda() for x in (ids, labels, is_answer))
        with torch.autocast("cuda", torch.bfloat16):
            new, entropy = score(own, follow, True)
        ratios = (new - old[row:row + 1].cuda()).exp()
        terms = -ratios * advantages[row:row + 1].cuda()
        loss = ((terms * mask).sum(-1) / mask.sum(-1)).mean() / len(rows)
        loss.backward()
        del own, follow, mask, new, entropy, ratios, terms, loss
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    weights = engine.llm_engine.model_executor.driver_worker.model_runner.model
    weights.load_weights(model.state_dict().items())
