"""Pictures and files for the tests of media."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image, ImageDraw


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an RGB picture with large shapes, lines, letters and a little noise."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 50 + 2, width // 50 + 2, 3), np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for k in range(12):
        x, y, z, w = (int(v) for v in rng.integers(0, (width, height, width, height)))
        colour = tuple(int(v) for v in rng.integers(0, 256, 3))
        draw.line((x, y, z, w), fill=colour, width=1 + k % 3)
        draw.text((x, y), "Sphinx of quartz", fill=colour)
    noise = rng.normal(0, 4, (height, width, 3))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()
