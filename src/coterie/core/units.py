"""Numbers of bytes as people read them."""

import re

_SIZES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def unit_of_bytes(number: float) -> tuple[float, str]:
    """Return the unit in which to write so many bytes: how many bytes it is, and its name."""
    return next((unit for unit in _UNITS if number >= unit[0]), (1.0, "bytes"))


def bytes_in_words(number: float) -> str:
    """Return a number of bytes with three digits and a unit: 1.23 MB."""
    size, name = unit_of_bytes(number)
    return f"{number / size:.3g} {name}"


def parse_bytes(text: str) -> int:
    """Return the number of bytes that text such as '500MB' or '2GB' means.

    Raises:
        ValueError: the text is not a size.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMG]?B?)\s*", text.upper())
    if not match or match[1].count(".") > 1 or match[1] == ".":
        raise ValueError("give a size such as 500MB or 2GB")
    unit = match[2] if match[2] in _SIZES else match[2] + "B"
    return max(1, int(float(match[1]) * _SIZES.get(unit, 1)))
