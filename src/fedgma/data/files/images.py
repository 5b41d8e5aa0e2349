"""Encoded pictures (PNG, JPEG, WebP) to uint8 arrays, on a few threads, with size and format checked first."""

import io
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np

from fedgma.data.files.dataset import Images
from fedgma.errors import DataError, FedgmaError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
LARGEST = 4096  # pixels a side; a picture that claims more is refused before it is unpacked


def decode(content: bytes, mode: str, size: tuple[int, int] | None = None) -> Images:
    """One picture as [channel, height, width]; `mode` is "L" or "RGB"; a `size` (width, height) is insisted upon."""
    pillow = _pillow()
    try:
        with pillow.open(io.BytesIO(content), formats=FORMATS) as picture:
            if (size is not None and picture.size != size) or max(picture.size) > LARGEST:
                raise DataError(f"a picture of {picture.size} pixels came where {size or 'a smaller one'} was expected")
            array = np.asarray(picture.convert(mode))
    except FedgmaError:
        raise
    except Exception as error:  # Pillow raises many kinds for a damaged picture
        raise DataError(f"a picture cannot be decoded: {error}") from None
    return array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))


def decode_all(contents: Sequence[bytes], mode: str, size: tuple[int, int]) -> Images:
    """Pictures of one size as [sample, channel, height, width]; Pillow decodes outside the interpreter's lock."""
    images = np.empty((len(contents), 1 if mode == "L" else 3, size[1], size[0]), np.uint8)

    def fill(place: int) -> None:
        images[place] = decode(contents[place], mode, size)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        deque(pool.map(fill, range(len(contents))), maxlen=0)  # runs through, and raises what a thread raised
    return images


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError:
        raise FedgmaError("reading pictures needs Pillow: pip install 'fedgma[sim]'") from None
    return Image
