"""Models of published collections at the size in which those ship them, built
from the collection's own configuration classes, with random weights.

They are exported as the documentation of each collection says: `transformers`
is traced, `torchvision` and `timm` are scripted. Only what draws random
numbers is switched off, by the option that the collection has for it
(dropout, stochastic depth): eager PyTorch draws in another order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.entry import Entry

ROWS = 8  # of a batch; 4 microbatches of 2
LENGTH = 16  # tokens in a row

PUBLISHED: dict[str, Entry] = {}


def published(name: str, traced: bool = False):
    """Adds a function that makes a model and a batch."""

    def add(make):
        PUBLISHED[name] = Entry(make, traced, False)
        return make

    return add


# -- transformers --------------------------------------------------------------


class TextLoss(nn.Module):
    """Calls the model by keywords and keeps the loss that it computes and what
    it predicts.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, return_dict=False)[:2]


class PixelLoss(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor):
        return self.model(pixel_values=pixel_values, labels=labels, return_dict=False)[:2]


def text(words: int, length: int = LENGTH) -> list[Tensor]:
    """Padded rows, and what to predict at the real tokens."""
    tokens = torch.randint(3, words, (ROWS, length))
    real = (torch.arange(length) < torch.randint(length // 2, length + 1, (ROWS, 1))).long()
    return [tokens, real, torch.where(real == 1, torch.randint(3, words, (ROWS, length)), -100)]


def pictures(side: int = 224, classes: int = 1000) -> list[Tensor]:
    return [torch.randn(ROWS, 3, side, side), torch.randint(0, classes, (ROWS,))]


@published("distilgpt2", traced=True)
def distilgpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=6, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return TextLoss(GPT2LMHeadModel(config)), text(config.vocab_size)


@published("bert_base", traced=True)
def bert_base():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return TextLoss(BertForMaskedLM(config)), text(config.vocab_size)


@published("distilroberta", traced=True)
def distilroberta():
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(
        num_hidden_layers=6, max_position_embeddings=514, type_vocab_size=1, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return TextLoss(RobertaForMaskedLM(config)), text(config.vocab_size)


@published("distilbert", traced=True)
def distilbert():
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    config = DistilBertConfig(dropout=0.0, attention_dropout=0.0)
    return TextLoss(DistilBertForMaskedLM(config)), text(config.vocab_size)


@published("albert_base", traced=True)
def albert_base():
    """Calls one layer twelve times."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        hidden_size=768, intermediate_size=3072, num_attention_heads=12, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return TextLoss(AlbertForMaskedLM(config)), text(config.vocab_size)


@published("opt_125m", traced=True)
def opt_125m():
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(dropout=0.0, use_cache=False)
    return TextLoss(OPTForCausalLM(config)), text(config.vocab_size)


@published("t5_small", traced=True)
def t5_small():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(dropout_rate=0.0, use_cache=False, decoder_start_token_id=0)
    return TextLoss(T5ForConditionalGeneration(config)), text(config.vocab_size)


@published("bart_base", traced=True)
def bart_base():
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        d_model=768, encoder_layers=6, decoder_layers=6, encoder_attention_heads=12, decoder_attention_heads=12,
        encoder_ffn_dim=3072, decoder_ffn_dim=3072, dropout=0.0, use_cache=False,
    )  # fmt: skip
    return TextLoss(BartForConditionalGeneration(config)), text(config.vocab_size)


def llama(tied: bool):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=12, num_key_value_heads=4,
        tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return TextLoss(LlamaForCausalLM(config)), text(config.vocab_size)


@published("llama_4_layers", traced=True)
def llama_4_layers():
    return llama(tied=False)


@published("llama_4_layers_tied", traced=True)
def llama_4_layers_tied():
    return llama(tied=True)


@published("vit_small", traced=True)
def vit_small():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_labels=1000, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return PixelLoss(ViTForImageClassification(config)), pictures()


# -- torchvision and timm ------------------------------------------------------


class ClassLoss(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)


@published("resnet18")
def resnet18():
    from torchvision.models import resnet18

    return ClassLoss(resnet18()), pictures()


@published("mobilenet_v3_small")
def mobilenet_v3_small():
    from torchvision.models import mobilenet_v3_small

    return ClassLoss(mobilenet_v3_small(dropout=0.0)), pictures()


@published("efficientnet_b0")
def efficientnet_b0():
    from torchvision.models import efficientnet_b0

    return ClassLoss(efficientnet_b0(dropout=0.0, stochastic_depth_prob=0.0)), pictures()


@published("swin_t")
def swin_t():
    """`swin_t()` fixes its stochastic depth, so this is the class with the sizes
    of that function.
    """
    from torchvision.models.swin_transformer import SwinTransformer

    model = SwinTransformer(
        patch_size=[4, 4], embed_dim=96, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], window_size=[7, 7],
        stochastic_depth_prob=0.0,
    )  # fmt: skip
    return ClassLoss(model), pictures()


@published("vit_b_32")
def vit_b_32():
    from torchvision.models import vit_b_32

    return ClassLoss(vit_b_32()), pictures()


@published("timm_mixer_s16")
def timm_mixer_s16():
    import timm

    return ClassLoss(timm.create_model("mixer_s16_224", scriptable=True)), pictures()
