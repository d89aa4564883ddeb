"""Writes what Hugging Face's models compute, for tests/runtime_hf_models_test.

Run in an environment with torch 2.11, transformers 4.57 and safetensors:
    python make_references.py

Each file holds a tiny model with random weights and one batch: "weight/NAME"
(tied ones once), "input/0", ... in the order in which smp's model takes them,
and as results "loss", "logits" and "gradient/NAME". Its metadata has all names
of the state dict with their shapes, tied ones under each name.
"""

import json

import torch
import transformers as hf
from safetensors.torch import save_file
from transformers.models.switch_transformers import modeling_switch_transformers as switch


def randomise(model):
    """Weights so large that every part matters in the result."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            p.normal_(1.0 if "norm" in name.lower() and "weight" in name else 0.0, 0.3)


def write(path, model, inputs, loss, logits):
    loss.backward()
    tensors = {f"input/{i}": x for i, x in enumerate(inputs)}
    tensors["loss"] = loss.detach()
    tensors["logits"] = logits.detach().contiguous()
    for name, p in model.named_parameters():
        tensors[f"weight/{name}"] = p.detach()
        tensors[f"gradient/{name}"] = p.grad
    names = {name: list(x.shape) for name, x in model.state_dict().items()}
    save_file(tensors, path, {"names": json.dumps(names)})
    print(path, f"{loss.item():.6f}", len(names))


def cross_entropy(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


sizes = dict(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
torch.manual_seed(0)


def tokens(*shape):
    return torch.randint(4, 40, shape)


def some_labels(x):
    """Labels for about a third of the tokens."""
    return torch.where(torch.rand(x.shape) < 0.35, x, -100)


def padded(x, padding):
    """The last three tokens of the first row are padding."""
    mask = torch.ones_like(x)
    mask[0, -3:] = 0
    return x.masked_fill(mask == 0, padding), mask


def gpt2():
    model = hf.GPT2LMHeadModel(hf.GPT2Config(
        vocab_size=40, n_positions=10, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager"))
    randomise(model)
    x = tokens(2, 9)
    inputs = [x[:, :-1].contiguous(), x[:, 1:].contiguous()]
    logits = model(inputs[0]).logits
    write("gpt2.safetensors", model, inputs, cross_entropy(logits, inputs[1]), logits)


def bert():
    model = hf.BertForMaskedLM(hf.BertConfig(
        **sizes, intermediate_size=40, max_position_embeddings=10,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        attn_implementation="eager"))
    randomise(model)
    x, mask = padded(tokens(2, 8), 0)
    segments = (torch.arange(8) > 3).long().expand(2, 8).contiguous()
    labels = some_labels(x).masked_fill(mask == 0, -100)
    out = model(x, attention_mask=mask, token_type_ids=segments, labels=labels)
    write("bert.safetensors", model, [x, mask, segments, labels], out.loss, out.logits)


def roberta():
    model = hf.RobertaForMaskedLM(hf.RobertaConfig(
        **sizes, intermediate_size=40, max_position_embeddings=12,
        type_vocab_size=1, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        attn_implementation="eager"))
    randomise(model)
    x, mask = padded(tokens(2, 8), 1)
    labels = some_labels(x).masked_fill(mask == 0, -100)
    out = model(x, attention_mask=mask, labels=labels)
    write("roberta.safetensors", model, [x, mask, labels], out.loss, out.logits)


def t5(path, **options):
    model = hf.T5ForConditionalGeneration(hf.T5Config(
        vocab_size=40, d_model=16, d_kv=6, d_ff=24, num_layers=2,
        num_decoder_layers=3, num_heads=2, relative_attention_num_buckets=8,
        relative_attention_max_distance=12, dropout_rate=0,
        decoder_start_token_id=0, **options))
    randomise(model)
    x, mask = padded(tokens(2, 20), 0)
    labels = tokens(2, 15)
    labels[1, -2:] = -100
    out = model(x, attention_mask=mask, labels=labels)
    write(path, model, [x, mask, labels], out.loss, out.logits)


def mixture():
    """The feed-forward part alone: no model has it in the blocks of a GPT."""
    model = switch.SwitchTransformersSparseMLP(hf.SwitchTransformersConfig(
        d_model=8, d_ff=12, num_experts=4, expert_capacity=64, dropout_rate=0))
    randomise(model)
    x = torch.randn(2, 6, 8)
    weights = torch.randn(2, 6, 8)
    y = model(x)[0]
    write("switch_mlp.safetensors", model, [x, weights], (y * weights).sum(), y)


gpt2()
bert()
roberta()
t5("t5.safetensors")
t5("t5_v1_1.safetensors", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
mixture()
