"""`coterie doctor`: what this machine has, and whether steps are compiled here."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.table import Table

from coterie.cli.console import say, show, stderr, stdout
from coterie.cli.errors import report_errors

PACKAGES = {
    "flower": ("flwr", "cryptography"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "parquet": ("pyarrow",),
    "peers": ("networkx",),
    "privacy": ("dp-accounting",),
    "images": ("pillow",),
    "huggingface": ("datasets", "flwr-datasets"),
    "figures": ("kaleido",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow",),
    "tune": ("optuna",),
    "notebook": ("pandas", "nbformat"),
}
FASTEST = "all is well: steps are compiled, and C++ repeats them"


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="print it as JSON, for a bug report")] = False,
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", help="where data sets lie (default: COTERIE_DATA)")
    ] = None,
) -> None:
    """Say what this machine has, and whether the fast path works, by running a tiny step."""
    with report_errors():
        found = examine(data_dir)
        console = stdout()
        if as_json:
            say(console, json.dumps(found, indent=2))
        else:
            table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
            table.add_column(style="bold", no_wrap=True)
            for key, value in found.items():
                table.add_row(key, _in_words(value))
            show(console, table)
        if not found["fast path"]["right"]:
            say(stderr(), "Compiled steps are wrong on this machine: set COTERIE_BACKEND=plain, and please report it.")
            raise typer.Exit(1)


def examine(data_dir: str | None = None) -> dict[str, Any]:
    """Return what there is, by name; the fast path is tried."""
    import torch

    from coterie import __version__
    from coterie.compute.availability import compiler, compiler_name
    from coterie.compute.cache import folder
    from coterie.compute.cpu import cores
    from coterie.compute.self_check import self_check
    from coterie.data import SOURCES
    from coterie.data.download.locations import data_folders

    check, kept = self_check(), folder()
    there: list[str] = []
    absent: list[str] = []
    for name, source in SOURCES.items():
        (there if source.files is None or source.files.find(data_dir) is not None else absent).append(name)
    return {
        "coterie": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": str(torch.__version__),
        "machine": f"{platform.system()} {platform.machine()}, {cores()} cores, {_memory()}",
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "GPU": _gpu(),
        "compiler": compiler() or f"none ({compiler_name()} is not on the PATH)",
        "cache": str(kept.path) + (f" ({kept.why_temporary})" if kept.why_temporary else ""),
        "fast path": {"path": check.path, "why": check.why, "right": check.right, "seconds": round(check.seconds, 2)},
        "extras": {extra: _versions(names) for extra, names in PACKAGES.items()},
        "data folders": [str(root) for root in data_folders(data_dir)],
        "data here": there,
        "data not here": absent,
    }


def _in_words(value: Any) -> str:
    if isinstance(value, dict) and "path" in value:
        words = value["why"] or (FASTEST if value["path"] == "replayed" else "")
        return f"{value['path']}: {words}" + (f" ({value['seconds']} s for a tiny step)" if value["seconds"] else "")
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value)


def _versions(names: tuple[str, ...]) -> str:
    """Versions of what an extra installs, or what is missing of it."""
    found = []
    for name in names:
        try:
            found.append(metadata.version(name))
        except metadata.PackageNotFoundError:
            return "not installed"
    return found[0]


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    except (AttributeError, ValueError, OSError):  # not on this system
        return "memory unknown"


def _gpu() -> str:
    import torch

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return "Apple (mps)" if torch.backends.mps.is_available() else "none"
