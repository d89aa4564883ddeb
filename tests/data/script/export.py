"""Writes the TorchScript files of this folder: python3 export.py

Small models, each for something that split TorchScript code can do; tests name
them and compare with plain execution of the same file. Every forward takes
x: [B, 8] and returns the scalar loss, or a tuple that begins with it.
"""

import tempfile
import warnings
from typing import Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

warnings.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: Optional[float] = None) -> Tuple[Tensor, Tensor]:
        hidden = torch.relu(self.up(x))
        if scale is not None:
            hidden = hidden * scale
        return self.down(hidden), hidden


class Mlp(nn.Module):
    """Classes shared by instances, optional arguments, re-use, a loop, a
    branch on data, a Sequential."""

    def __init__(self):
        super().__init__()
        self.a = Block(8)
        self.b = Block(8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16),
                                  nn.ReLU(inplace=True), nn.Linear(16, 8))
        self.heads = nn.ModuleList([nn.Linear(8, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        y, hidden = self.a(x, 0.5)
        if bool(hidden.sum() > 1.0):
            y = y + self.b(y)[0]
        y = self.a(y)[0]
        y = self.body(y)
        parts: List[Tensor] = []
        for head in self.heads:
            parts.append(head(y))
        return torch.cat(parts, 1).pow(2).mean()


class TracedMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Block(8)
        self.b = Block(8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x):
        y = self.a(x)[0]
        y, hidden = self.b(y)
        y = self.a(y + hidden[:, :8])[0]
        return self.body(y).pow(2).mean()


@torch.jit.interface
class Head(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pass


class PlainHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Helper(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.norm = nn.LayerNorm(8)

    def mix(self, x: Tensor) -> Tensor:
        return x * self.scale

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(self.norm(x), w) + self.mix(x)


class Reads(nn.Module):
    """Parameters of children in operations, views, lists, dictionaries, as
    arguments, by helper methods, behind an interface; a shape alone."""

    head: Head

    def __init__(self):
        super().__init__()
        self.one = Helper()
        self.two = Helper()
        self.table = nn.ModuleDict({"p": nn.Linear(8, 8), "q": nn.Linear(8, 8)})
        self.head = PlainHead()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x, self.two.weight)
        y = y + torch.matmul(y, self.one.weight.t())
        weights = [self.one.scale, self.two.scale]
        named: Dict[str, Tensor] = {"bias": self.table["p"].bias}
        for w in weights:
            y = y * w
        y = y + named["bias"] + self.two.mix(y)
        for layer in self.table.values():
            y = torch.tanh(layer(y))
        y = y + self.head(y) * float(self.two.weight.size(0)) / 8
        z = self.attention(y.unsqueeze(1), y.unsqueeze(1), y.unsqueeze(1))[0]
        return (y + z.squeeze(1)).pow(2).mean()


class Counter(nn.Module):
    seen: Tensor
    calls: int

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("total", torch.zeros(1))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total = self.total + x.detach().mean()
        return self.fc(x) + self.total


class Writes(nn.Module):
    """Buffers and attributes of children written in every way."""

    def __init__(self):
        super().__init__()
        self.counter = Counter()
        self.other = Counter()
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.counter(x)
        self.counter.seen.add_(1.0)
        self.other.seen[1] = self.other.seen[1] + y.detach().mean()
        part = self.counter.seen[2:]
        part.mul_(1.5)
        self.other.calls = self.counter.calls * 2
        y = self.other(y) + float(self.other.calls)
        return self.last(y + self.counter.seen.sum()).pow(2).mean()


class Norms(nn.Module):
    """One batch norm used twice, and its statistics updated from outside."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.bn = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.fc(x))
        y = self.bn(self.out(torch.relu(y)))
        return y.pow(3).mean()


class Statistics(nn.Module):
    """Statistics of another module changed by an operation that does not say
    so."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.kept = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.batch_norm(self.fc(x), self.kept.running_mean,
                                     self.kept.running_var, self.kept.weight,
                                     self.kept.bias, training=True)
        return y.pow(3).mean()


class Book(nn.Module):
    history: List[Tensor]

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.history = [torch.zeros(1)]

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(x.detach().mean())
        return self.fc(x)

    def length(self) -> int:
        return len(self.history)


class Books(nn.Module):
    """A list in an attribute grows in its module and is read from outside."""

    def __init__(self):
        super().__init__()
        self.book = Book()

    def forward(self, x: Tensor) -> Tensor:
        y = self.book(x)
        return (y.pow(2).mean() * float(len(self.book.history)) + self.book.history[-1]
                + float(self.book.length()))


class BookChanged(Books):
    """The list grows from outside, which works only where the module is."""

    def forward(self, x: Tensor) -> Tensor:
        self.book.history.append(x.detach().mean())
        return self.book(x).pow(2).mean() + self.book.history[-2]


class Forks(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.jit.fork(self.fc, x)
        return torch.jit.wait(y).pow(2).mean()


class Collect(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, kept: List[Tensor], named: Dict[str, Tensor]) -> Tensor:
        y = torch.tanh(self.fc(x))
        kept.append(y)
        named["last"] = y * 2
        return y


class Lists(nn.Module):
    """Lists and dictionaries that callees change."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Collect() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        kept: List[Tensor] = []
        named: Dict[str, Tensor] = {}
        for layer in self.layers:
            x = layer(x, kept, named)
        return torch.stack(kept).pow(2).mean() + named["last"].mean()


class AddOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1.0)
        return x


class Views(nn.Module):
    """Arguments changed in place, views of them too; results that are
    arguments."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.same = nn.Identity()
        self.add = AddOne()
        self.relu = nn.ReLU(inplace=True)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.add(y[:, :4])
        z = self.same(y)
        z.mul_(2.0)
        y = self.relu(y * 1.0)
        return self.out(y + z).pow(2).mean()


class State(NamedTuple):
    hidden: Tensor
    steps: int


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, state: State) -> State:
        return State(torch.tanh(self.fc(state.hidden)), state.steps + 1)


class Named(nn.Module):
    """Named tuples across ranks; several outputs."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([Cell() for _ in range(3)])

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        state = State(x, 0)
        for cell in self.cells:
            state = cell(state)
        y = state.hidden * float(state.steps)
        return y.pow(2).mean(), y


class Keep(nn.Module):
    last: Tensor

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.last = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class GradientStored(nn.Module):
    """Stores a tensor with gradient in a module that may be elsewhere."""

    def __init__(self):
        super().__init__()
        self.keep = Keep()

    def forward(self, x: Tensor) -> Tensor:
        y = self.keep(x)
        self.keep.last = y
        return y.pow(2).mean() + self.keep.last.mean()


class ParameterChanged(nn.Module):
    """Changes a parameter of a module that may be elsewhere."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc.weight.clamp_(-0.2, 0.2)
        return self.fc(x).pow(2).mean()


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x[0, 0] > 100.0):
            raise ValueError("the first element is too large")
        return self.fc(x)


class Fails(nn.Module):
    """Fails in a submodule if the first element is above 100."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), Deep())

    def forward(self, x: Tensor) -> Tensor:
        return self.body[1](x).pow(2).mean() + self.body(x).mean()


@torch.jit.script
class Box:
    def __init__(self, x: Tensor):
        self.x = x


class Opens(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, box: Box) -> Tensor:
        return self.fc(box.x)


class Objects(nn.Module):
    """An object of a script class as an argument: refused by name."""

    def __init__(self):
        super().__init__()
        self.opens = Opens()

    def forward(self, x: Tensor) -> Tensor:
        return self.opens(Box(x)).pow(2).mean()


class Mixed(nn.Module):
    """Attention in bfloat16 whose softmax is in float32, as Hugging Face's eager
    one: TorchScript's own gradient of it multiplies one type with the other."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(8, 16)
        self.key = nn.Linear(8, 16)
        self.out = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)
        query = self.query(x).view(-1, 4, 4)
        key = self.key(x).view(-1, 4, 4)
        weights = torch.softmax(query @ key.transpose(1, 2), -1, dtype=torch.float32).to(torch.bfloat16)
        return self.out(weights @ key).float().pow(2).mean()


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.body(x)).pow(2).mean()


class Rows(nn.Module):
    """Has the number of rows in it, which microbatches do not have."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.turned = Turned()

    def forward(self, x: Tensor) -> Tensor:
        return self.turned(self.body(x)).pow(2).mean()


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(8, 2, 4).transpose(1, 2).reshape(8, 8)


class OutsideOperator(nn.Module):
    """Calls an operator of tests/plugins/model_operators.cpp."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.smp_test.twice(self.body(x)).pow(2).mean()


def save(script, name: str):
    """Saves without the debug records: they name files of this machine."""
    with tempfile.TemporaryDirectory() as directory:
        whole = f"{directory}/{name}"
        script.save(whole)
        reader = torch._C.PyTorchFileReader(whole)
        writer = torch._C.PyTorchFileWriter(name)
        for record in reader.get_all_records():
            if record.endswith(".debug_pkl") or record in ("version", "byteorder", ".data/serialization_id"):
                continue
            data = reader.get_record(record)
            writer.write_record(record, data, len(data))
        writer.write_end_of_file()


def scripted(name: str, model: nn.Module):
    save(torch.jit.script(model), f"{name}.pt")


def main():
    torch.manual_seed(1)
    scripted("mlp", Mlp())
    save(torch.jit.trace(TracedMlp(), torch.randn(4, 8), check_trace=False), "traced.pt")
    scripted("reads", Reads())
    scripted("writes", Writes())
    scripted("norms", Norms())
    scripted("statistics", Statistics())
    scripted("books", Books())
    scripted("book_changed", BookChanged())
    scripted("forks", Forks())
    scripted("lists", Lists())
    scripted("views", Views())
    scripted("named", Named())
    scripted("gradient_stored", GradientStored())
    scripted("parameter_changed", ParameterChanged())
    scripted("fails", Fails())
    scripted("objects", Objects())
    save(torch.jit.trace(Mixed().to(torch.bfloat16), torch.randn(8, 8)), "mixed.pt")
    save(torch.jit.trace(Dropping().eval(), torch.randn(8, 8)), "evaluated.pt")
    save(torch.jit.trace(Rows(), torch.randn(8, 8)), "rows.pt")
    library = torch.library.Library("smp_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CompositeImplicitAutograd")
    scripted("outside_operator", OutsideOperator())
    # Files that cannot be split.
    frozen = torch.jit.freeze(torch.jit.script(TracedMlp().eval()))
    save(frozen, "frozen.pt")
    inlined = torch.jit.script(TracedMlp())
    torch._C._jit_pass_inline(inlined.graph)
    save(inlined, "inlined.pt")
    torch.save(PlainHead().state_dict(), "state_dict.pt")
    program = torch.export.export(PlainHead(), (torch.randn(2, 8),))
    torch.export.save(program, "exported.pt2")


if __name__ == "__main__":
    main()
