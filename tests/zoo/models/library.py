"""What PyTorch brings."""

from typing import List

import torch
from torch import Tensor, nn

from models.entry import WIDTH, WORDS, model, words
from models.language import next_word_loss


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 8, num_layers=2, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(16, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.lstm(self.words(tokens))
        x, _ = self.gru(x)
        h = torch.zeros(tokens.size(0), 8)
        out: List[Tensor] = []
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            out.append(h)
        return next_word_loss(self.head(torch.stack(out, 1)), tokens)


@model("recurrent")
def recurrent():
    return Recurrent(), [words()]


class EncoderDecoder(nn.Module):
    """PyTorch's own transformer layers read the weights of their children."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        self.decoder = nn.ModuleList(
            [nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        self.look_back = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.words(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.words(target)
        mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask)
        x = x + self.look_back(x, memory, memory, need_weights=False)[0]
        return next_word_loss(self.head(x), target)


@model("encoder_decoder")
def encoder_decoder():
    return EncoderDecoder(), [words(), words(5)]
