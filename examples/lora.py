"""LoRA on real text: a small GPT knows English manual pages, and clients teach it other languages through adapters.

    python examples/lora.py

Each language of the manual pages on this machine is a client: a natural skew. Where there are none, each page of this
repository's documentation is a client. Only the adapters are trained and travel. Averaging A and B apart is not
averaging their products B A; the program shows how far off it is, and the perplexity of both, with and without a mask.
No data are downloaded.
"""

import copy
import gzip
import re
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedgma
from fedgma.aggregation.adapters import Products
from fedgma.data.files.dataset import Dataset, Split
from fedgma.data.files.own.text import load_text
from fedgma.experiments.outcome import Outcome
from fedgma.training.adapters import with_adapters
from fedgma.training.models import parameter_count

MANUALS, PAGES = Path("/usr/share/man"), Path(__file__).resolve().parents[1] / "docs"
LENGTH, WIDTH, HEADS, BLOCKS, RANK = 64, 48, 4, 2, 4
SECTION = 12_000  # bytes of a page that are read: many pages, not one long one


class Block(nn.Module):
    """Causal self-attention and a dense layer, each after a layer normalisation and beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[sample, token, width] to the same."""
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(-2, -3) for part in self.mix(self.before(x)).split(WIDTH, -1)
        )
        later = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1)
        scores = (query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).masked_fill(later, float("-inf"))
        x = x + self.join((scores.softmax(-1) @ value).transpose(-2, -3).flatten(-2))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class GPT(nn.Module):
    """A decoder with learned positions: bytes [sample, token] to logits [sample, token, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.last, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next byte at every position."""
        places = torch.arange(x.shape[-1], device=x.device)
        return self.out(self.last(self.blocks(self.tokens(x) + self.positions(places))))


def manual(folder: Path, size: int) -> bytes:
    """About `size` bytes of the text of manual pages, without the commands of their layout."""
    text = b""
    for page in sorted(folder.glob("*.gz")):
        with gzip.open(page) as file:
            lines = [line for line in file.read(SECTION).splitlines() if not line.startswith((b".", b"'"))]
        text += re.sub(rb"\\(f\(..|f.|[-&|])", b"", b"\n".join(lines)) + b"\n"
        if len(text) >= size:
            break
    return text[:size]


def texts(languages: int, size: int) -> tuple[bytes, dict[str, bytes]]:
    """The text that the model knows before, and that of each client, by its name."""
    found = {folder.parent.name: manual(folder, size) for folder in sorted(MANUALS.glob("*/man1"))}
    clients = {name: text for name, text in found.items() if len(text) >= size}
    known = manual(MANUALS / "man1", 6 * size)
    if len(clients) >= 4 and len(known) >= size:
        return known, dict(list(clients.items())[:languages])
    pages = {page.stem: page.read_bytes()[:size] for page in sorted(PAGES.glob("*.md"))}
    pages = {name: text for name, text in pages.items() if len(text) > 10 * LENGTH}
    return b"".join(pages.pop(name) for name in list(pages)[:4]), dict(list(pages.items())[:languages])


def as_dataset(clients: dict[str, bytes]) -> Dataset:
    """Windows of all texts; a text is a client, and its end is for testing."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in clients.items():
            (Path(folder) / f"{name}.txt").write_bytes(text)
        return load_text(Path(folder), length=LENGTH)


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int, rate: float) -> nn.Module:
    """A copy of the model after some steps of AdamW on these windows; frozen parameters stay as they are."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=rate)
    for _ in range(steps):
        batch = torch.randint(len(x), (16,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]).flatten(0, 1), y[batch].flatten()).backward()
        optimizer.step()
    return model


def adapters_of(model: nn.Module) -> dict[str, Tensor]:
    """What travels: the trainable parameters."""
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def errors(model: nn.Module, split: Split, steps: int) -> dict[str, float]:
    """How far the next products are from the mean of the clients' products, over how far that mean moved."""
    assert split.client is not None
    start, locals_, counts = adapters_of(model), [], []
    for client in sorted(set(split.client.tolist())):
        x, y = (torch.from_numpy(part[split.client == client]) for part in (split.x, split.y))
        locals_.append(adapters_of(trained(model, x, y, steps, 0.003)))
        counts.append(len(x))
    products = [Products().lift(one) for one in locals_]
    goal = {
        name: sum(n * one[name] for n, one in zip(counts, products, strict=True)) / sum(counts) for name in products[0]
    }

    def distance(params: dict[str, Tensor]) -> float:
        lifted = Products().lift(params)
        return sum(float((lifted[name] - goal[name]).square().sum()) for name in goal) ** 0.5

    rules = {"apart": fedgma.mean(), "product": fedgma.in_products(fedgma.mean())}
    nexts = {name: fedgma.server_round(start, locals_, counts, aggregator=rule) for name, rule in rules.items()}
    return {name: distance(result.params) / distance(start) for name, result in nexts.items()}


def perplexity(model: nn.Module, split: Split) -> float:
    """The perplexity of a model over all tokens of a split."""
    with torch.no_grad():
        return F.cross_entropy(model(torch.from_numpy(split.x)).mT, torch.from_numpy(split.y)).exp().item()


def main(languages: int = 6, size: int = 12_000, steps: int = 200, rounds: int = 6, seeds: int = 1) -> Outcome:
    """Pre-train, measure the error of averaging A and B apart, and compare perplexities over paired seeds."""
    torch.set_num_threads(1)
    known, clients = texts(languages, size)
    data = as_dataset(clients)
    english = torch.frombuffer(bytearray(known[: len(known) // (LENGTH + 1) * (LENGTH + 1)]), dtype=torch.uint8)
    windows = english.view(-1, LENGTH + 1).long()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = GPT()
    base = trained(base, windows[:, :-1], windows[:, 1:], steps, 0.003)
    model = with_adapters(base, "blocks.*", rank=RANK)
    print(f"clients: {', '.join(clients)}")
    print(f"{parameter_count(model)} of {sum(p.numel() for p in model.parameters())} parameters travel\n")
    print("distance to the mean of the clients' products, as a share of its step:")
    for local in (steps // 25, steps // 4):
        found = errors(model, data.train, local)
        print(f"{local:4d} local steps: {found['apart']:5.1%} apart, {found['product']:5.1%} by the best of that rank")
    settings = {
        "task": "next_token",
        "partition": "natural",  # a client is a language
        "clients_per_round": len(clients),
        "rounds": rounds,
        "batch_size": 16,
        "client_optimizer": "adamw",
        "client_learning_rate": 0.003,
        "aggregator": ["mean", "gma"],
        "adapters": ["apart", "product"],
        "evaluate_every": rounds,
        "seed": list(range(seeds)),
    }
    print(f"\nperplexity of the model without adapters: {perplexity(base, data.test):.2f}")
    outcome = fedgma.run(settings, data=data, model=model)
    print(outcome)
    return outcome


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
