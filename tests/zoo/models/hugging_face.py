"""Models of the library `transformers`, as it has them, in tiny random sizes.

They are traced, with the loss that they compute from labels.
"""

import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from models.entry import ROWS, WIDTH, WORDS, model, words


class Loss(nn.Module):
    """Calls the model by keywords and keeps the loss."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, return_dict=False)[0]


def padding(length: int) -> Tensor:
    real = torch.randint(length // 2, length + 1, (ROWS, 1))
    return (torch.arange(length) < real).long()


@model("hf_gpt2", traced=True)
def hf_gpt2():
    config = GPT2Config(
        vocab_size=WORDS, n_positions=8, n_embd=WIDTH, n_layer=3, n_head=2, n_inner=24, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = words()
    return Loss(GPT2LMHeadModel(config)), [tokens, torch.ones_like(tokens), tokens.clone()]


@model("hf_bert", traced=True)
def hf_bert():
    config = BertConfig(
        vocab_size=WORDS, max_position_embeddings=8, hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
    )  # fmt: skip
    return Loss(BertForMaskedLM(config)), [words(), padding(6), words()]


@model("hf_roberta", traced=True)
def hf_roberta():
    """Four heads, as four ranks may share a layer; it counts the places of what is not padding."""
    config = RobertaConfig(
        vocab_size=WORDS, max_position_embeddings=10, hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=1,
        bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return Loss(RobertaForMaskedLM(config)), [words(), padding(6), words()]


@model("hf_albert", traced=True)
def hf_albert():
    """Calls one layer three times, so the trace has three methods of each module in it."""
    config = AlbertConfig(
        vocab_size=WORDS, max_position_embeddings=8, embedding_size=8, hidden_size=WIDTH, num_hidden_layers=3,
        num_attention_heads=4, intermediate_size=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return Loss(AlbertForMaskedLM(config)), [words(), padding(6), words()]


@model("hf_llama", traced=True)
def hf_llama():
    """Its attention has a dropout of 0, its positions a buffer that stays."""
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, tie_word_embeddings=True, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return Loss(LlamaForCausalLM(config)), [words(), padding(6), words()]


@model("hf_t5", traced=True)
def hf_t5():
    config = T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=6, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
        relative_attention_num_buckets=8, decoder_start_token_id=0, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return Loss(T5ForConditionalGeneration(config)), [words(), padding(6), words(5)]
