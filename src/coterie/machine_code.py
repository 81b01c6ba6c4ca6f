"""From a traced step to machine code, by TorchInductor; what has been compiled once is kept on disk for other runs.

The cache is TorchInductor's own: in the folder TORCHINDUCTOR_CACHE_DIR, else in the user's cache folder
(~/.cache/coterie, or in XDG_CACHE_HOME). It can be deleted at any time. It holds sources and what the C++ compiler made
of them. TorchInductor could keep whole graphs too, and start sooner, but as pickles, which we neither write nor
read. Most of its modules choose a folder in /tmp when they are imported, so none of them is before one is chosen here.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
TAKES = 6.0  # seconds, about, of a step that is not in the cache: 4 to 12 were seen
COLD = 9.0  # more, where nothing is in the cache: TorchInductor then finds out what the processor can do
_taken: list[float] = []  # seconds, in this process


def compiling_takes() -> float:
    """Seconds that compiling a step may take: what the last one took here; the first starts the compiler, too."""
    if len(_taken) > 1:
        return _taken[-1]
    folder = Path(os.environ.get(FOLDER) or cache_folder())
    cold = not _taken and not (folder.is_dir() and any(folder.iterdir()))
    return min([TAKES, *_taken]) + COLD * cold


def compile_graph(graph: torch.fx.GraphModule, example: list[Tensor]) -> tuple[Callable[..., list[Tensor]], Any]:
    """(the graph as a function of tensors of the shapes of `example`, the code behind it).

    Raises what TorchInductor raises.
    """
    os.environ.setdefault(FOLDER, str(cache_folder()))
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    begin = time.perf_counter()
    made = list[Any]()

    def inner(*args: Any, **kwargs: Any) -> Any:
        made.append(compile_fx_inner(*args, **kwargs))
        return made[-1]

    with torch._inductor.config.patch(fx_graph_cache=False):
        run: Any = compile_fx(graph, list[Any](example), inner_compile=inner)
    _taken.append(time.perf_counter() - begin)
    return run, getattr(made[0], "current_callable", None)


def cache_folder() -> Path:
    """Where nobody else can write: what is found there is run."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "coterie" / "torchinductor"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # no home folder, or a full or read-only one
        return Path(tempfile.mkdtemp(prefix="coterie-"))
