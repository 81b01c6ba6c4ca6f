"""Reads image files with Pillow, which is an optional dependency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coterie.core.errors import DataError

MAX_PIXELS = 2**28  # of one image: 768 MB as RGB


def read_rgb(path: Path, max_pixels: int = MAX_PIXELS) -> Any:
    """Read an image file as RGB.

    The size is read from the header and checked before any pixel is decoded, so a small file cannot fill the memory.

    Args:
        path: An image of any format that Pillow reads.
        max_pixels: Larger images are refused.

    Returns:
        A `PIL.Image.Image` in mode RGB.

    Raises:
        DataError: Pillow is not installed, or the file is missing, damaged, too large or not an image.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"reading '{path}' needs Pillow: pip install 'coterie[images]'") from error
    try:
        with Image.open(path) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise DataError(f"'{path}' is too large: {width} x {height} pixels, but at most {max_pixels} are read")
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"'{path}' cannot be read as an image: {error}") from error
