"""Decodes images (PNG, JPEG, WebP) to uint8 arrays, on several threads, after a check of size and format."""

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
LARGEST = 4096  # pixels per side; larger images are refused before they are decoded


def decode(content: bytes, mode: str, size: tuple[int, int] | None = None) -> Images:
    """Decode one image to [channel, height, width]; `mode` is "L" or "RGB"; raises unless it has `size`, if given."""
    pillow = _pillow()
    try:
        with pillow.open(io.BytesIO(content), formats=FORMATS) as image:
            if (size is not None and image.size != size) or max(image.size) > LARGEST:
                expected = f"of size {size}" if size is not None else f"of at most {LARGEST} pixels per side"
                raise DataError(f"expected an image {expected}, got {image.size}")
            if image.mode[0] in "IF":  # Pillow would cut off all that is above 255
                raise DataError(
                    f"expected 8 bits for each pixel and channel, got an image of type {image.mode}; scale it to 8 "
                    "bits, or give float arrays as .npy"
                )
            if "transparency" in image.info:  # else Pillow warns of the palettes of some images
                image = image.convert("RGBA")
            array = np.asarray(image.convert(mode))
    except FedgmaError:
        raise
    except Exception as error:  # Pillow raises many types of errors for damaged images
        raise DataError(f"the image cannot be decoded: {str(error).partition(' <')[0]}") from None
    return array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))


def decode_all(contents: Sequence[bytes], mode: str, size: tuple[int, int]) -> Images:
    """Decode images of one size to [sample, channel, height, width], on threads: Pillow releases the GIL."""
    images = np.empty((len(contents), 1 if mode == "L" else 3, size[1], size[0]), np.uint8)

    def fill(index: int) -> None:
        images[index] = decode(contents[index], mode, size)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        deque(pool.map(fill, range(len(contents))), maxlen=0)  # waits for all, and raises errors of the threads
    return images


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError:
        raise FedgmaError("decoding images needs Pillow: pip install 'fedgma[sim]'") from None
    return Image
