"""Rows that page to disk are rows: whatever is put and taken, they say what a tree in memory says."""

import gc
import os
from pathlib import Path

import pytest
import torch

from coterie import paged, tree
from coterie.errors import CheckpointError
from coterie.paged import FIRST, Paged, Segment, Store

SIZE = 40


def first():
    return {"a": (torch.arange(6.0).reshape(2, 3), torch.tensor(7)), "b": torch.tensor([True, False])}


def some(number, draw):
    return {
        "a": (torch.randn(number, 2, 3, generator=draw), torch.randint(9, (number,), generator=draw)),
        "b": torch.rand(number, 2, generator=draw) > 0.5,
    }


def same(a, b):
    left, right = tree.pack(a), tree.pack(b)
    assert left.keys() == right.keys()
    for name, leaf in left.items():
        assert leaf.dtype == right[name].dtype
        assert torch.equal(leaf, right[name]), name


def everyone(rows):
    return paged.take(rows, torch.arange(SIZE))


@pytest.mark.parametrize("memory", [0, 200, 10**9])
def test_rows_are_those_of_a_tree_in_memory(tmp_path, monkeypatch, memory):
    monkeypatch.setattr(paged, "SMALL", 0)
    draw = torch.Generator().manual_seed(0)
    ours = Store(memory, tmp_path).rows(first(), SIZE)
    theirs = tree.clone(tree.broadcast(first(), SIZE))
    history = []
    for _ in range(30):
        ids = torch.randperm(SIZE, generator=draw)[: int(torch.randint(1, 9, (1,), generator=draw))]
        new = some(len(ids), draw)
        ours, theirs = paged.put(ours, ids, new), paged.put(theirs, ids, new)
        history.append((ours, theirs))
        asked = torch.randint(SIZE, (5,), generator=draw)  # the same one may be asked for twice
        same(paged.take(ours, asked), paged.take(theirs, asked))
        same(paged.take(ours, int(asked[0])), paged.take(theirs, int(asked[0])))
    for before, was in history:  # a value does not change
        same(everyone(before), everyone(was))
    same(everyone(ours), theirs)
    weights = torch.rand(SIZE, generator=draw) * (torch.arange(SIZE) % 3 > 0)
    torch.testing.assert_close(paged.mean(ours, weights), paged.mean(theirs, weights))
    more = ours.resized(SIZE + 2)
    same(paged.take(more, torch.arange(SIZE)), theirs)
    same(paged.take(more, SIZE + 1), first())
    assert not list(tmp_path.iterdir()), "files that were paged out to have no name"


def test_memory_is_bounded_and_old_segments_go():
    draw = torch.Generator().manual_seed(0)
    row = {"w": torch.zeros(1000)}
    store = Store(100 * 4000)
    rows = store.rows(row, 1000)
    assert isinstance(rows, Paged)
    for _ in range(120):
        rows = rows.put(torch.randperm(1000, generator=draw)[:20], {"w": torch.randn(20, 1000, generator=draw)})
        held = [segment for segment in store._segments.values() if segment.map is None]
        assert sum(segment.nbytes for segment in held) <= store.memory
    gc.collect()
    assert len(store._segments) == len(rows.segments) - 1, "what nobody refers to is dropped"
    # 1,000 rows count at most; of every segment, a quarter does.
    assert sum(segment.size for number, segment in rows.segments.items() if number != FIRST) < 2500


def test_what_was_read_is_given_back(tmp_path):
    if not Path("/proc/self/smaps").exists():
        pytest.skip("needs Linux's account of mapped memory")
    store = Store(0, tmp_path)
    rows = store.rows({"w": torch.zeros(25_000)}, 1000).put(torch.arange(1000), {"w": torch.ones(1000, 25_000)})

    def resident():
        lines = Path("/proc/self/smaps").read_text().splitlines()
        at = [i for i, line in enumerate(lines) if ".rows-" in line]
        return sum(int(line.split()[1]) for i in at for line in lines[i : i + 8] if line.startswith("Rss"))

    assert bool((rows.take(torch.arange(500))["w"] == 1).all())
    assert resident() < 1000  # of 50,000 kB read


def test_few_rows_stay_a_tree():
    assert not isinstance(Store(10**9).rows(first(), SIZE), Paged)
    assert isinstance(Store(10**3).rows(first(), SIZE), Paged), "memory bounds them, however few"
    assert Store(10**3).rows((), SIZE) == ()


def test_a_full_disk_is_told_in_words(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(paged, "save_file", full)
    rows = Store(0, tmp_path).rows(first(), SIZE)
    with pytest.raises(CheckpointError, match=r"clients' states cannot be written.*No space left"):
        rows.put(torch.arange(3), some(3, torch.Generator().manual_seed(0)))
    assert not list(tmp_path.iterdir())


def test_a_segment_that_has_a_file_is_mapped_from_it(tmp_path):
    from safetensors.torch import save_file

    flat = paged.flatten(some(3, torch.Generator().manual_seed(0)))
    path = tmp_path / "rows.safetensors"
    save_file(flat, path)
    segment = Segment(flat, path)
    segment.page_out(tmp_path)
    assert segment.map is not None
    same(segment.flat, flat)
    assert list(tmp_path.iterdir()) == [path]
