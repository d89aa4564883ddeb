"""Language models."""

from typing import Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.entry import ROWS, WIDTH, LENGTH, WORDS, CLASSES, classes, model, rows, words


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Optional[Tensor], causal: bool) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0, is_causal=causal
        )
        return self.out(a.transpose(1, 2).reshape(b, t, c))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool, dropout: float = 0.0):
        super().__init__()
        self.causal = causal
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask, self.causal)
        return x + self.mlp(self.norm2(x))


def next_word_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), tokens[:, 1:].reshape(-1))


class GPT(nn.Module):
    def __init__(self, layers: int = 4, dropout: float = 0.0):
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([TransformerBlock(WIDTH, 2, True, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.size(1))))
        for block in self.h:
            x = block(x)
        return next_word_loss(self.head(self.norm(x)), tokens)


@model("gpt")
def gpt():
    return GPT(), [words()]


@model("dropout", random=True)
def dropout():
    return GPT(layers=2, dropout=0.2), [words()]


class DropPath(nn.Module):
    """Leaves a block out for some rows, as `timm` writes it."""

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if self.probability == 0.0 or not self.training:
            return x
        keep = 1 - self.probability
        return x * x.new_empty([x.size(0), 1]).bernoulli_(keep).div_(keep)


class DropPathBlock(nn.Module):
    def __init__(self, probability: float):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop1 = nn.Dropout(0.0)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)
        self.drop2 = nn.Dropout(0.0)
        self.path = DropPath(probability)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.path(self.drop2(self.fc2(self.drop1(torch.tanh(self.fc1(x))))))


class DropPathMLP(nn.Module):
    """Some dropouts draw and others have nothing to draw."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[DropPathBlock(p) for p in (0.0, 0.3, 0.5)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(x)), y)


@model("drop_path", random=True)
def drop_path():
    return DropPathMLP(), [rows(WIDTH), classes()]


class BERT(nn.Module):
    """A mask of padding goes to every block; two heads, two losses."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.segments = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList([TransformerBlock(WIDTH, 2, False) for _ in range(3)])
        self.pooler = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.heads = nn.ModuleDict({"word": nn.Linear(WIDTH, WORDS), "pair": nn.Linear(WIDTH, 2)})

    def forward(
        self, tokens: Tensor, segments: Tensor, real: Tensor, labels: Tensor, follows: Tensor
    ) -> Tuple[Tensor, Dict[str, Tensor]]:
        x = self.norm(self.words(tokens) + self.positions + self.segments(segments))
        mask = real[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        losses: Dict[str, Tensor] = {}
        for name, head in self.heads.items():
            if name == "word":
                losses[name] = F.cross_entropy(head(x).flatten(0, 1), labels.flatten())
            else:
                losses[name] = F.cross_entropy(head(self.pooler(x[:, 0])), follows)
        return losses["word"] + losses["pair"], losses


@model("bert")
def bert():
    real = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1))
    return BERT(), [words(), torch.randint(0, 2, (ROWS, LENGTH)), real, words(), torch.randint(0, 2, (ROWS,))]


class RelativeAttention(nn.Module):
    """Only the first one of a stack has the bias; the others are given it."""

    def __init__(self, has_bias: bool):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.reach = LENGTH
        self.bias: Optional[nn.Embedding] = nn.Embedding(2 * LENGTH, 1) if has_bias else None

    def forward(self, x: Tensor, memory: Tensor, causal: bool, bias: Optional[Tensor]) -> Tuple[Tensor, Optional[Tensor]]:
        q = self.query(x)
        k, v = self.key_value(memory).chunk(2, -1)
        scores = q @ k.transpose(1, 2) / q.size(-1) ** 0.5
        own = self.bias
        if own is not None:
            distance = torch.arange(k.size(1))[None, :] - torch.arange(q.size(1))[:, None]
            bias = own(distance + self.reach).squeeze(-1)
            if causal:
                bias = bias.masked_fill(distance > 0, -1e9)
        if bias is not None:
            scores = scores + bias
        return scores.softmax(-1) @ v, bias


class T5Block(nn.Module):
    def __init__(self, decoder: bool, has_bias: bool):
        super().__init__()
        self.decoder = decoder
        self.norm1 = nn.LayerNorm(WIDTH)
        self.own = RelativeAttention(has_bias)
        self.cross: Optional[RelativeAttention] = RelativeAttention(False) if decoder else None
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, memory: Optional[Tensor], bias: Optional[Tensor]) -> Tuple[Tensor, Optional[Tensor]]:
        y = self.norm1(x)
        a, bias = self.own(y, y, self.decoder, bias)
        x = x + a
        cross = self.cross
        if cross is not None and memory is not None:
            x = x + cross(x, memory, False, None)[0]
        return x + self.mlp(self.norm2(x)), bias


class T5Stack(nn.Module):
    def __init__(self, words: nn.Embedding, decoder: bool):
        super().__init__()
        self.words = words
        self.blocks = nn.ModuleList([T5Block(decoder, i == 0) for i in range(2)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, memory: Optional[Tensor] = None) -> Tensor:
        x = self.words(tokens)
        bias: Optional[Tensor] = None
        for block in self.blocks:
            x, bias = block(x, memory, bias)
        return self.norm(x)


class T5(nn.Module):
    """Encoder and decoder share one embedding module; the relative bias of each
    stack's first block goes to the next ones.
    """

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(WORDS, WIDTH)
        self.encoder = T5Stack(self.shared, False)
        self.decoder = T5Stack(self.shared, True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return next_word_loss(self.head(self.decoder(target, self.encoder(source))), target)


@model("t5")
def t5():
    return T5(), [words(), words(5)]


class TiedLM(nn.Module):
    """The head is another module with the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*[TransformerBlock(WIDTH, 2, True) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return next_word_loss(self.head(self.blocks(self.embedding(tokens))), tokens)


@model("tied_lm")
def tied_lm():
    return TiedLM(), [words()]


class TiedInCode(nn.Module):
    """The weight of a child is used by its parent and by a sibling."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.recur = Recur()
        self.bias = nn.Parameter(torch.zeros(WORDS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.recur(self.embedding(tokens), self.embedding.weight)
        return next_word_loss(F.linear(x, self.embedding.weight, self.bias), tokens)


class Recur(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        near = (x @ table.t()).softmax(-1) @ table
        return x + self.mix(near)


@model("weight_as_argument")
def weight_as_argument():
    return TiedInCode(), [words()]
