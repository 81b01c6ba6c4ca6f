"""Paged rows in checkpoints. A segment is written once, as a file that several checkpoints share.

checkpoints/rows-DIGEST.safetensors     a segment, named by its content
checkpoints/round-00007/state.json      "rows": {path in the state: {segment number: [file, its checksum]}}
checkpoints/round-00007/state.safetensors, at that path: each client's segment and its row there

So a checkpoint of many clients costs what the rounds since the last one changed. A file is deleted when no checkpoint
refers to it any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CheckpointError
from coterie.core.tree import Params, Tree
from coterie.storage import files, paged_rows
from coterie.storage.paged_rows import FIRST, InFile, Paged, Segment

SegmentFiles = dict[str, dict[str, list[str]]]  # path in the state: {segment number: [file, its checksum]}


def write(folder: Path, state: Tree) -> tuple[Params, SegmentFiles]:
    """Write the segments of a state that are in no file yet.

    Args:
        folder: the run's folder of checkpoints.
        state: the state; some of its leaves may be `Paged`.

    Returns:
        (what remains to be written of the state, where its paged rows are)
    """
    found: SegmentFiles = {}

    def home(path: str, leaf: Any) -> Tensor:
        if not isinstance(leaf, Paged):
            return leaf  # type: ignore[no-any-return]
        segments = {str(number): segment for number, segment in leaf.segments.items() if number != FIRST}
        found[path] = {number: _written(folder, segment) for number, segment in segments.items()}
        return leaf.home

    return tree.pack(paged_rows.walk(state, home)), found


def read(folder: Path, flat: Params, about: SegmentFiles, like: Tree) -> Tree:
    """Put a state together from what `write` returned.

    Args:
        folder: the run's folder of checkpoints.
        flat: what was not paged, and where each client's row is.
        about: the files of the paged rows.
        like: a state of the same structure.

    Raises:
        ValueError: it has another structure than `like`.
        CheckpointError: a file is damaged, or missing.
    """
    flat, made = dict(flat), {}

    def bare(path: str, leaf: Any) -> Tensor:
        if not isinstance(leaf, Paged):
            return leaf  # type: ignore[no-any-return]
        if path in about:
            made[path] = _opened(folder, about[path], flat[path], leaf)
        else:  # that run had more memory, or a version that did not page
            names = {name: f"{path}/{name}".rstrip("/") for name in tree.pack(leaf.first)}
            rows = {name: flat.pop(whole) for name, whole in names.items() if whole in flat}
            made[path] = leaf.put(torch.arange(len(leaf)), tree.unpack(rows, tree.broadcast(leaf.first, len(leaf))))
            flat[path] = leaf.home
        return leaf.home

    structure = paged_rows.walk(like, bare)
    if more := about.keys() - made.keys():
        raise ValueError(f"{', '.join(more)} is paged there and would not be here: use the memory of before")
    tree.unpack(flat, structure)
    return paged_rows.walk(like, lambda path, _: made[path] if path in made else flat[path])


def prune(folder: Path, kept: Iterable[Path]) -> None:
    """Delete the segments that no checkpoint in `kept` refers to; none, if one of these cannot be read."""
    try:
        about = [files.read_json(checkpoint / "state.json") for checkpoint in kept]
    except CheckpointError:
        return
    used = {name for each in about for rows in dict(each).get("rows", {}).values() for name, _ in rows.values()}
    for path in [*folder.glob("rows-*.safetensors"), *folder.glob(".rows-*.tmp")]:
        if path.name not in used:
            path.unlink(missing_ok=True)


def _written(folder: Path, segment: Segment) -> list[str]:
    if segment.file is None or segment.file.parent != folder or not segment.file.exists():
        building = folder / ".rows.safetensors"
        files.write_tensors(building, segment.rows.flat)
        segment.checksum = files.checksum(building)
        segment.file = folder / f"rows-{segment.checksum[:32]}.safetensors"
        building.rename(segment.file)
    return [segment.file.name, segment.checksum]


def _opened(folder: Path, about: dict[str, list[str]], home: Tensor, blank: Paged) -> Paged:
    segments = {FIRST: blank.segments[FIRST]}
    widths = {name: numbers for name, (_, numbers) in segments[FIRST].rows.shapes.items()}
    for number, (name, checksum) in about.items():
        path = folder / name
        files.check(path, checksum)
        segment = Segment(InFile(path), path, checksum)
        if {key: numbers for key, (_, numbers) in segment.rows.shapes.items()} != widths:
            raise ValueError(f"'{name}' has rows of another form")
        segments[int(number)] = segment
    numbers, rows = home.unbind(1)
    sizes = torch.tensor([segments[n].size if n in segments else 0 for n in numbers.tolist()])
    if home.shape != blank.home.shape or bool(((rows < 0) | (rows >= sizes)).any()):
        raise ValueError("it refers to rows that are not there")
    return Paged(blank.store, blank.first, home, segments)
