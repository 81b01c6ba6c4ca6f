"""`coterie` and `python -m coterie` are the command line, in a process of its own.

Importing PyTorch makes half a million objects that stay until the end. Python's garbage collector would look at them
again and again while they are made, in every full collection of a run, and once more when the process ends: a sixth of
the processor time of a short run. Only a program that owns its process may tell the collector, so the library does not.
"""

from __future__ import annotations

import gc


def main() -> None:
    """Run the command line."""
    gc.disable()
    from coterie.cli import main as run

    gc.freeze()  # what was imported stays
    gc.enable()
    try:
        run()
    finally:
        gc.freeze()  # the process ends, and the system takes back all memory at once


if __name__ == "__main__":
    main()
