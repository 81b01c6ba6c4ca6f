"""Numbers of bytes as people read them."""

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def unit_of_bytes(number: float) -> tuple[float, str]:
    """Return the unit in which to write so many bytes: how many bytes it is, and its name."""
    return next((unit for unit in _UNITS if number >= unit[0]), (1.0, "bytes"))


def bytes_in_words(number: float) -> str:
    """Return a number of bytes with three digits and a unit: 1.23 MB."""
    size, name = unit_of_bytes(number)
    return f"{number / size:.3g} {name}"
