"""Modules as users write them, for `bench_modules.py`: nothing in fedgma knows them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """Three dense layers with batch normalisation."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 256) -> None:
        super().__init__()
        size = shape[0] * shape[1] * shape[2]
        self.layers = nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(size, width), nn.BatchNorm1d(width), nn.ReLU()),
            *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()),
            nn.Linear(width, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class VGG(nn.Module):
    """Six 3x3 convolutions in three stages."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        layers, channels = [], shape[0]
        for width in (32, 64, 128):
            for _ in range(2):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(128 * (shape[1] // 8) * (shape[2] // 8), classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


class Attention(nn.Module):
    """Self-attention written out: one projection, scaled dot products, one projection."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inside, self.outside = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        parts = self.inside(x).view(samples, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*parts, is_causal=self.causal)
        return self.outside(found.transpose(1, 2).reshape(samples, tokens, width))


class Layer(nn.Module):
    """A transformer layer with normalisation first."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A small vision transformer; `ready` takes torch's own encoder layer."""

    def __init__(self, shape: tuple[int, ...], classes: int, *, ready: bool = False, width: int = 128) -> None:
        super().__init__()
        self.patches = nn.Conv2d(shape[0], width, 4, 4)
        self.places = nn.Parameter(torch.randn(shape[1] // 4 * (shape[2] // 4), width) * 0.02)
        options = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        layers = [nn.TransformerEncoderLayer(width, 4, **options) if ready else Layer(width, 4) for _ in range(4)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.layers(x).mean(1))


def ready_vit(shape: tuple[int, ...], classes: int) -> nn.Module:
    return ViT(shape, classes, ready=True)


class GRU(nn.Module):
    """Reads an image row by row."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 128) -> None:
        super().__init__()
        self.gru = nn.GRU(shape[0] * shape[2], width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 1, 3).flatten(2)
        return self.head(self.gru(rows)[0][:, -1])


class GPT(nn.Module):
    """A small language model over tokens."""

    def __init__(self, shape: tuple[int, ...], tokens: int, width: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(shape[0], width)
        self.layers = nn.Sequential(*[Layer(width, 4, causal=True) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places.weight[: x.shape[1]]
        return self.head(self.norm(self.layers(self.tokens(x) + places)))


def tiny_linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A step of microseconds: Python takes most of the time."""
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2] // 64, classes))


def norm_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two convolutions with batch normalisation."""
    first = (nn.Conv2d(shape[0], 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32, classes))


def dropout_mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Draws random numbers while it trains."""
    size = shape[0] * shape[1] * shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, classes))


def hooked_mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Calls a function of the user's in every pass."""
    layers = nn.Sequential(
        nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 64), nn.ReLU(), nn.Linear(64, classes)
    )
    layers[1].register_forward_hook(lambda layer, given, found: found * 1.0)
    return layers


class LSTM(nn.Module):
    """Reads an image row by row."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 64) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(shape[0] * shape[2], width, batch_first=True), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.permute(0, 2, 1, 3).flatten(2))[0][:, -1])


class Bag(nn.Module):
    """The mean of the embeddings of an image's bright places."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 32) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(2 * shape[0] * shape[1] * shape[2], width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        bright = (x.flatten(1) > 0).long()
        return self.head(self.bag(2 * torch.arange(bright.shape[1], device=x.device) + bright))
