"""Next-token prediction: a small GPT learns the documentation of fedgma, each page a client.

    python examples/tokens.py            # or another folder of text files: python examples/tokens.py FOLDER

A token is a byte. Clients train with AdamW, and their learning rate falls over the rounds along a cosine. No
data are downloaded: the text is this repository's.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedgma
from fedgma.data.files.dataset import Dataset, Split
from fedgma.data.files.own.text import load_text
from fedgma.experiments.outcome import Outcome

PAGES = Path(__file__).resolve().parents[1] / "docs"
LENGTH, WIDTH, HEADS, BLOCKS = 64, 48, 4, 2


class Block(nn.Module):
    """Causal self-attention and a dense layer, each after a layer normalisation and beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[sample, token, width] to the same."""
        x = x + self.attend(self.before(x))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))

    def attend(self, x: Tensor) -> Tensor:
        """Every token looks at itself and at those before it."""
        length = x.shape[-2]
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(-2, -3) for part in self.mix(x).split(WIDTH, -1))
        scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.join((weights @ value).transpose(-2, -3).flatten(-2))


class GPT(nn.Module):
    """A decoder with learned positions: tokens [sample, token] to logits [sample, token, vocabulary]."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(classes, WIDTH), nn.Embedding(shape[0], WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.last, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        places = torch.arange(x.shape[-1], device=x.device)
        return self.out(self.last(self.blocks(self.tokens(x) + self.positions(places))))


def read(folder: Path, pages: int, windows: int) -> Dataset:
    """The first windows of the first pages; each page is a client, and its end is for testing."""
    data = load_text(folder, length=LENGTH)

    def first(split: Split, most: int) -> Split:
        assert split.client is not None
        kept = [i for page in range(pages) for i in (split.client == page).nonzero()[0][:most]]
        return Split(split.x[kept], split.y[kept], split.client[kept])

    return data._replace(train=first(data.train, windows), test=first(data.test, max(1, windows // 4)))


def write(model: GPT, start: str, length: int = 100) -> str:
    """A text that goes on with the likeliest token."""
    text = list(start.encode())
    with torch.no_grad():
        for _ in range(length):
            text.append(int(model(torch.tensor([text[-LENGTH:]]))[0, -1].argmax()))
    return bytes(text).decode(errors="replace")


def main(folder: Path = PAGES, pages: int = 12, windows: int = 64, rounds: int = 16, seeds: int = 4) -> Outcome:
    """Compare GMA with the plain mean over paired seeds; then let one of the models write."""
    data = read(folder, pages, windows)
    settings = {
        "task": "next_token",
        "partition": "natural",  # a client is a page
        "clients_per_round": min(4, pages),
        "rounds": rounds,
        "batch_size": 16,
        "client_optimizer": "adamw",
        "client_learning_rate": 0.003,
        "round_schedule": "cosine",
        "gradient_clip": 1.0,
        "evaluate_every": rounds,
        "seed": list(range(seeds)),
    }
    outcome = fedgma.run(settings, data=data, model=GPT)
    print(outcome)
    model = GPT((LENGTH,), len(data.classes))
    model.load_state_dict(outcome.state_dict("mean"))
    print(write(model.eval(), "The model "))
    return outcome


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
