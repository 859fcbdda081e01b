"""Post-training in the manner of GRPO, which knows nothing of analyzer, to be run dry:

    analyzer dryrun examples/grpo_loop.py --device l4 --show cycle

An iteration draws completions from the policy, scores them under a reference and under the policy as it is, rewards
them, and learns from them in a few epochs of micro-batches.
"""
from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from transformers import Qwen2Config, Qwen2ForCausalLM


def make_model() -> nn.Module:
    config = Qwen2Config(vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
                         num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True)
    return Qwen2ForCausalLM(config).to(device="cuda", dtype=torch.bfloat16)


def log_probs_of(model: nn.Module, ids: Tensor, completion: int) -> Tensor:
    """Log probabilities of the last ``completion`` tokens of each row."""
    logits = model(input_ids=ids).logits[:, -completion - 1:-1]
    return logits.float().log_softmax(-1).gather(-1, ids[:, -completion:, None]).squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=4, help="completions of each prompt")
    parser.add_argument("--completion", type=int, default=32, help="tokens of each")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=100)
    options = parser.parse_args()

    policy, reference = make_model(), make_model().eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    for _ in range(options.iterations):
        prompts = torch.randint(0, 8192, (options.prompts, 64), device="cuda")
        policy.eval()
        with torch.no_grad():
            ids = policy.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, pad_token_id=0,
                                  min_new_tokens=options.completion, max_new_tokens=options.completion,
                                  num_return_sequences=options.group)
            expected = log_probs_of(reference, ids, options.completion)
            old = log_probs_of(policy, ids, options.completion)
        with record_function("rewards"):
            rewards = (ids[:, -options.completion:] % 7 == 0).float().mean(1).view(-1, options.group)
            advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        policy.train()
        for _ in range(options.epochs):
            for rows in torch.arange(len(ids), device="cuda").split(options.group):
                new = log_probs_of(policy, ids[rows], options.completion)
                ratio = (new - old[rows]).exp()
                gain = torch.min(ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows])
                apart = (expected[rows] - new).exp() - (expected[rows] - new) - 1
                loss = (0.04 * apart - gain).mean() / options.prompts
                loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
