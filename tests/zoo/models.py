"""Small models, each with one habit that breaks a pipeline that assumes too much.

They are written as a PyTorch user writes them: nothing here knows about smp.
A model is called with one batch of ROWS rows and returns its loss (a mean over
the rows), or a tuple that begins with it.
"""

from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 8  # of a batch; 4 microbatches of 2
WIDTH = 12
LENGTH = 6  # tokens in a row
WORDS = 29
CLASSES = 5


class Entry(NamedTuple):
    make: Callable[[], Tuple[nn.Module, List[Tensor]]]
    traced: bool
    random: bool  # draws random numbers: no number can be expected beforehand


ZOO: Dict[str, Entry] = {}


def model(name: str, traced: bool = False, random: bool = False):
    """Adds a function that makes a model and a batch to the zoo."""

    def add(make):
        ZOO[name] = Entry(make, traced, random)
        return make

    return add


def rows(*sizes: int) -> Tensor:
    return torch.randn(ROWS, *sizes)


def words(length: int = LENGTH) -> Tensor:
    return torch.randint(0, WORDS, (ROWS, length))


def classes() -> Tensor:
    return torch.randint(0, CLASSES, (ROWS,))


# -- chains and trees ----------------------------------------------------------


class MLP(nn.Module):
    """A chain in two nested Sequentials."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 20),
            nn.GELU(),
            nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20)),
            nn.LayerNorm(20),
        )
        self.head = nn.Linear(20, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), y)


@model("mlp", traced=True)
def mlp():
    return MLP(), [rows(WIDTH), classes()]


class TwoTowers(nn.Module):
    """Two encoders that share nothing and meet in a product."""

    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 8))
        self.item = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, query: Tensor, item: Tensor, clicked: Tensor) -> Tuple[Tensor, Tensor]:
        score = (self.query(query) * self.item(item)).sum(-1) * self.scale
        return F.binary_cross_entropy_with_logits(score, clicked), score


@model("two_towers")
def two_towers():
    return TwoTowers(), [rows(WIDTH), rows(10), torch.randint(0, 2, (ROWS,)).float()]


class Level(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(self.norm(x)))


class SkipLink(nn.Module):
    """What the first block gives is used again by the last one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.middle = nn.ModuleList([Level(16) for _ in range(4)])
        self.last = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        start = torch.relu(self.first(x))
        h = start
        for level in self.middle:
            h = level(h)
        return F.cross_entropy(self.last(torch.cat([h, start], -1)), y)


@model("skip_link")
def skip_link():
    return SkipLink(), [rows(WIDTH), classes()]


# -- language models -----------------------------------------------------------


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


# -- what depends on data ------------------------------------------------------


class Branch(nn.Module):
    """Which of two modules runs depends on the rows."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.low = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.high = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        if bool(x.sum() > 0):
            h = self.high(h)
        else:
            h = self.low(h)
        return F.cross_entropy(self.head(h), y)


@model("branch")
def branch():
    x = rows(WIDTH)
    x[0:2] += 1  # the microbatches of two rows go high, low, high, low
    x[2:4] -= 1
    x[4:6] += 1
    x[6:8] -= 1
    return Branch(), [x, classes()]


class EarlyExit(nn.Module):
    """Leaves a loop over modules when it is sure."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.levels = nn.ModuleList([Level(16) for _ in range(4)])
        self.exits = nn.ModuleList([nn.Linear(16, CLASSES) for _ in range(4)])

    def forward(self, x: Tensor, y: Tensor) -> Tuple[Tensor, int]:
        h = self.first(x)
        loss = torch.zeros(())
        depth = 0
        done = False
        for level, exit in zip(self.levels, self.exits):
            if not done:
                h = level(h)
                logits = exit(h)
                loss = loss + F.cross_entropy(logits, y)
                depth += 1
                done = bool(logits.detach().softmax(-1).amax(-1).mean() > 0.40 - 0.01 * depth)
        return loss / depth, depth


@model("early_exit")
def early_exit():
    scale = torch.tensor([0.3, 0.3, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    return EarlyExit(), [rows(WIDTH) * scale[:, None], classes()]


class Experts(nn.Module):
    """Each row goes to one expert. Who gets no row is called with none
    (`always`) or not at all.
    """

    def __init__(self, experts: int, always: bool):
        super().__init__()
        self.always = always
        self.router = nn.Linear(16, experts)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 16)) for _ in range(experts)]
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero().squeeze(-1)
            if self.always or mine.numel() > 0:
                out = out.index_add(0, mine, expert(x[mine]))
        return x + out * weight.unsqueeze(-1)


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.sparse = Experts(3, False)
        self.empty = Experts(4, True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.empty(self.sparse(torch.tanh(self.first(x))))), y)


@model("experts")
def experts():
    return MixtureOfExperts(), [rows(WIDTH), classes()]


class Packed(nn.Module):
    """Padding is cut out before the expensive part: sizes differ with every
    microbatch.
    """

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, length: Tensor, y: Tensor) -> Tensor:
        real = torch.arange(tokens.size(1)) < length[:, None]
        packed = self.body(self.words(tokens[real]))
        row = real.nonzero()[:, 0]
        mean = torch.zeros(tokens.size(0), packed.size(1)).index_add(0, row, packed) / length[:, None]
        return F.cross_entropy(self.head(mean), y)


@model("packed")
def packed():
    return Packed(), [words(9), torch.tensor([9, 1, 3, 3, 8, 2, 5, 9]), classes()]


# -- who is called, and how often ----------------------------------------------


class Reused(nn.Module):
    """One module runs three times and stands in the tree twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.level = Level(16)
        self.between = nn.Linear(16, 16)
        self.tail = nn.Sequential(nn.LayerNorm(16), self.level, nn.Linear(16, CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.level(self.level(self.first(x)))
        return F.cross_entropy(self.tail(torch.relu(self.between(h))), y)


@model("reused")
def reused():
    return Reused(), [rows(WIDTH), classes()]


class Pair(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        return torch.tanh(self.left(x)), torch.tanh(self.right(x))


class UnusedOutput(nn.Module):
    """Outputs that lead nowhere, that are only looked at, and a module that
    nobody calls.
    """

    def __init__(self):
        super().__init__()
        self.first = Pair(WIDTH)
        self.dead = Pair(WIDTH)
        self.looked_at = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tuple[Tensor, Tensor]:
        used, _ = self.first(x)
        self.dead(used)
        norm = self.looked_at(used).detach().norm()
        return F.cross_entropy(self.head(used), y), norm


@model("unused_output")
def unused_output():
    return UnusedOutput(), [rows(WIDTH), classes()]


class FrozenTrunk(nn.Module):
    """Only the head and an adapter in the middle are trained."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.low = TransformerBlock(WIDTH, 2, False)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.high = TransformerBlock(WIDTH, 2, False)
        self.head = nn.Linear(WIDTH, CLASSES)
        for part in [self.words, self.low, self.high]:
            part.requires_grad_(False)

    def forward(self, tokens: Tensor, y: Tensor) -> Tensor:
        x = self.low(self.words(tokens))
        return F.cross_entropy(self.head(self.high(x + self.adapter(x)).mean(1)), y)


@model("frozen_trunk")
def frozen_trunk():
    return FrozenTrunk(), [words(), classes()]


class Teacher(nn.Module):
    """Runs without gradients and counts how often."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.calls = 0
        self.register_buffer("temperature", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.net(x) / self.temperature).softmax(-1)


class Distillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = Teacher()
        self.student = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tuple[Tensor, int]:
        with torch.no_grad():
            target = self.teacher(x)
        return F.cross_entropy(self.student(x), target), self.teacher.calls


@model("teacher")
def teacher():
    return Distillation(), [rows(WIDTH)]


# -- arguments and results of all kinds ----------------------------------------


class TakesAll(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(
        self,
        features: Dict[str, Tensor],
        history: List[Tensor],
        span: Tuple[int, float],
        axes: List[int],
        bias: Optional[Tensor] = None,
        kind: str = "tanh",
        scale: Optional[float] = None,
        gated: bool = False,
    ) -> Tuple[Dict[str, Tensor], List[Tensor], Tuple[Optional[Tensor], str]]:
        x = self.fc(features["x"])
        if bias is not None:
            x = x + bias
        if scale is not None:
            x = x * scale
        x = torch.tanh(x) if kind == "tanh" else torch.relu(x)
        gate: Optional[Tensor] = None
        if gated:
            gate = torch.sigmoid(self.gate(x))
        for h in history:
            x = x + h * span[1]
        x = x - x.mean(axes, keepdim=True) / span[0]
        return {"x": x, "was": features["x"]}, [x * 2, x + 1], (gate, kind)


class Arguments(nn.Module):
    """Dicts, lists, tuples, options, strings and plain numbers between modules."""

    def __init__(self):
        super().__init__()
        self.a = TakesAll()
        self.b = TakesAll()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tuple[Tensor, Dict[str, Tensor]]:
        features, history, _ = self.a({"x": x}, [], (3, 0.5), [1])
        features, history, more = self.b(
            features, history, (2, 0.25), [0, 1], bias=x, kind="relu", scale=0.7, gated=True
        )
        gate, kind = more
        h = features["x"] + features["was"]
        if gate is not None:
            h = h * gate
        if kind == "relu":
            h = h + history[1]
        return F.cross_entropy(self.head(h), y), {"gate": h.detach()}


@model("arguments")
def arguments():
    return Arguments(), [rows(WIDTH), classes()]


class Collector(nn.Module):
    """Appends to a list and writes into a dict that its caller owns."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: List[Tensor], notes: Dict[str, Tensor]) -> Tensor:
        h = torch.tanh(self.fc(x))
        seen.append(h)
        notes["last"] = h.mean(-1, keepdim=True)
        return h


class Collected(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Collector() for _ in range(3)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen: List[Tensor] = []
        notes: Dict[str, Tensor] = {}
        for layer in self.layers:
            x = layer(x, seen, notes)
        return F.cross_entropy(self.head(torch.stack(seen).sum(0) + notes["last"]), y)


@model("changed_list")
def changed_list():
    return Collected(), [rows(WIDTH), classes()]


class WritesItsArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        change = torch.tanh(self.fc(x.clone()))
        x.mul_(0.5).add_(change)
        return x


class InPlace(nn.Module):
    """A module changes its argument, once whole, once through a view."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.writes = WritesItsArgument()
        self.relu = nn.ReLU(inplace=True)
        self.same = nn.Identity()
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x) * 1.5
        self.writes(h[:, : x.size(1)])
        k = self.same(h + 0.1)
        k.mul_(2)
        self.relu(k)
        return F.cross_entropy(self.head(h + k), y)


@model("in_place")
def in_place():
    return InPlace(), [rows(WIDTH), classes()]


@torch.jit.interface
class Encoder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pass


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.of_head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))

    @torch.jit.export
    def classify(self, x: Tensor) -> Tensor:
        return self.of_head(x) + self.of_head.bias.sum() * 0.1


class Methods(nn.Module):
    """Methods other than forward, an interface, and parameters read from
    outside: their values, their shape, through a list.
    """

    encoder: Encoder

    def __init__(self):
        super().__init__()
        self.encoder = Narrow()
        self.other = Classifier()
        self.by_name = nn.ModuleDict({"one": nn.Linear(WIDTH, WIDTH), "two": nn.Linear(WIDTH, WIDTH)})

    @torch.jit.export
    def decay(self) -> Tensor:
        total = torch.zeros(())
        for w in [self.other.fc.weight, self.by_name["one"].weight[1:3]]:
            total = total + w.pow(2).sum()
        return total

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.encoder(x)
        for name, part in self.by_name.items():
            h = h + part(h) / part.weight.size(0)
        return F.cross_entropy(self.other.classify(self.other(h)), y) + 0.01 * self.decay()


@model("methods")
def methods():
    return Methods(), [rows(WIDTH), classes()]


# -- state ---------------------------------------------------------------------


class ConvNet(nn.Module):
    """Batch norm: running statistics depend on the order of microbatches."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), y)


@model("convnet")
def convnet():
    return ConvNet(), [rows(2, 8, 8), classes()]


class Running(nn.Module):
    """Keeps a mean in a buffer that it binds anew, and one that it writes."""

    mean: Tensor
    peak: Tensor

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("peak", torch.zeros(WIDTH))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        with torch.no_grad():
            self.mean = 0.8 * self.mean + 0.2 * h.mean(0)
            self.peak[1:] = torch.maximum(self.peak[1:] * 0.9, h.amax(0)[1:])
        self.steps += 1
        return torch.tanh(h - self.mean)


class Counts(nn.Module):
    """State that its parent reads, and changes."""

    def __init__(self):
        super().__init__()
        self.running = Running()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tuple[Tensor, int]:
        self.rows += x.size(0)
        h = self.running(x) + self.running.peak / self.running.steps
        self.running.peak.mul_(0.99)
        return F.cross_entropy(self.head(h), y), self.running.steps


@model("running_state")
def running_state():
    return Counts(), [rows(WIDTH), classes()]


# -- what PyTorch brings -------------------------------------------------------


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
