"""GPT-2 and Llama of the zoo are transformers' models: same parameters, same logits and loss from the same weights."""
import pytest
import torch

from analyzer import zoo
from analyzer.zoo.causal_lm import CausalLMOutput
from analyzer.zoo.gpt2 import GPT2
from analyzer.zoo.llama import Llama, LlamaConfig

transformers = pytest.importorskip("transformers")

# Llama: embedding + layers * (q, o: h*h; k, v: h*h_kv; three h*f; two norms) + final norm
PARAMETERS = {
    "gpt2": 124_439_808,  # the published checkpoint
    "llama_1b": 128256 * 2048 + 16 * (2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048) + 2048,
    "llama_405b": 2 * 128256 * 16384 + 126 * (2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248 + 2 * 16384) + 16384,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    with torch.device("meta"):
        model = zoo.MODELS[name].factory()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]  # parameters() gives a tied weight once
    assert (PARAMETERS["llama_1b"], PARAMETERS["llama_405b"]) == (1_235_814_400, 405_853_388_800)


def make_gpt2() -> tuple[torch.nn.Module, torch.nn.Module]:
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=31, n_positions=16, n_embd=24, n_layer=2, n_head=3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ))
    ours = GPT2(vocabulary=31, positions=16, hidden=24, layers=2, heads=3, dropout=0.0)
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # transformers keeps these transposed
    ours.load_state_dict({n: w.T if n.endswith(linear) else w for n, w in theirs.state_dict().items()})
    return ours, theirs


def make_llama(kv_heads: int, tied: bool) -> tuple[torch.nn.Module, torch.nn.Module]:
    sizes = dict(vocab_size=31, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
                 num_key_value_heads=kv_heads, rms_norm_eps=1e-5, tie_word_embeddings=tied)
    rope = dict(rope_type="default", rope_theta=500000.0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters=rope))
    ours = Llama(LlamaConfig(**sizes, rope_theta=500000.0))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


CASES = {"gpt2": make_gpt2, "llama grouped": lambda: make_llama(kv_heads=2, tied=True),
         "llama": lambda: make_llama(kv_heads=6, tied=False)}


@pytest.mark.parametrize("case", CASES)
def test_computes_what_transformers_computes(case: str) -> None:
    torch.manual_seed(0)
    ours, theirs = CASES[case]()
    ids, labels = torch.randint(31, (2, 13)), torch.randint(31, (2, 13))
    labels[0, 4] = -100  # ignored by both
    expected = theirs(input_ids=ids, labels=labels)
    logits = ours(ids)
    assert isinstance(logits, torch.Tensor)
    output = ours(input_ids=ids, labels=labels)
    assert isinstance(output, CausalLMOutput)
    torch.testing.assert_close(logits, expected.logits)  # float32 rounding: they sum in another order
    torch.testing.assert_close(output.logits, expected.logits)
    torch.testing.assert_close(output.loss, expected.loss)
    assert output.loss.shape == () and output.loss > 1  # near ln 31 = 3.4 for untrained weights
    output.loss.backward()
    expected.loss.backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        gradient = gradients[name].grad
        if parameter.shape != gradient.shape or name.endswith(("c_attn.weight", "attn.c_proj.weight")):
            gradient = gradient.T
        torch.testing.assert_close(parameter.grad, gradient, msg=lambda m, name=name: f"{name}: {m}")


def test_dropout_of_gpt2_acts_only_in_training() -> None:
    torch.manual_seed(0)
    model = GPT2(vocabulary=11, positions=8, hidden=16, layers=1, heads=2, dropout=0.5)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))
