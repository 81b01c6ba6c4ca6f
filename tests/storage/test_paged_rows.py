"""Rows that page to disk are rows: whatever is put and taken, they say what a tree in memory says."""

import gc
import os
from pathlib import Path

import pytest
import torch

from coterie.cli.memory import keep_freed_memory
from coterie.core import client_rows, tree
from coterie.core.errors import CheckpointError
from coterie.storage import paged_rows
from coterie.storage.paged_rows import FIRST, InFile, InMemory, Paged, Segment, Store

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
    return client_rows.take(rows, torch.arange(SIZE))


@pytest.mark.parametrize("memory", [0, 200, 10**9])
def test_rows_are_those_of_a_tree_in_memory(tmp_path, monkeypatch, memory):
    monkeypatch.setattr(paged_rows, "UNPAGED_BYTES", 0)
    draw = torch.Generator().manual_seed(0)
    ours = Store(memory, tmp_path).rows(first(), SIZE)
    theirs = tree.clone(tree.broadcast(first(), SIZE))
    history = []
    for _ in range(30):
        ids = torch.randperm(SIZE, generator=draw)[: int(torch.randint(1, 9, (1,), generator=draw))]
        new = some(len(ids), draw)
        ours, theirs = client_rows.put(ours, ids, new), client_rows.put(theirs, ids, new)
        history.append((ours, theirs))
        asked = torch.randint(SIZE, (5,), generator=draw)  # the same one may be asked for twice
        same(client_rows.take(ours, asked), client_rows.take(theirs, asked))
        same(client_rows.take(ours, int(asked[0])), client_rows.take(theirs, int(asked[0])))
    for before, was in history:  # a value does not change
        same(everyone(before), everyone(was))
    same(everyone(ours), theirs)
    weights = torch.rand(SIZE, generator=draw) * (torch.arange(SIZE) % 3 > 0)
    torch.testing.assert_close(client_rows.mean(ours, weights), client_rows.mean(theirs, weights))
    more = ours.resized(SIZE + 2)
    same(client_rows.take(more, torch.arange(SIZE)), theirs)
    same(client_rows.take(more, SIZE + 1), first())
    assert not list(tmp_path.iterdir()), "files that were paged out to have no name"


def test_memory_is_bounded_and_old_segments_go():
    draw = torch.Generator().manual_seed(0)
    row = {"w": torch.zeros(1000)}
    store = Store(100 * 4000)
    rows = store.rows(row, 1000)
    assert isinstance(rows, Paged)
    for _ in range(120):
        rows = rows.put(torch.randperm(1000, generator=draw)[:20], {"w": torch.randn(20, 1000, generator=draw)})
        held = [segment for segment in store._segments.values() if segment.in_memory]
        assert sum(segment.nbytes for segment in held) <= store.memory
    gc.collect()
    assert len(store._segments) == len(rows.segments) - 1, "what nobody refers to is dropped"
    # 1,000 rows count at most; of every segment, a quarter does.
    assert sum(segment.size for number, segment in rows.segments.items() if number != FIRST) < 2500


@pytest.mark.parametrize("memory", [0, 10**9], ids=("filed", "held"))
def test_rows_of_any_type_and_form(tmp_path, monkeypatch, memory):
    monkeypatch.setattr(paged_rows, "UNPAGED_BYTES", 0)
    types = [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.complex64, torch.bool]
    new = {str(dtype): torch.arange(30).reshape(5, 2, 3).to(dtype) for dtype in types}
    new |= {"number": torch.arange(5), "none": torch.zeros(5, 0), "transposed": torch.rand(2, 3, 5).movedim(2, 0)}
    rows = Store(memory, tmp_path).rows(tree.rows(new, 0), SIZE).put(torch.arange(5), new)
    assert rows.segments[FIRST + 1].in_memory is bool(memory)
    taken = rows.take(torch.tensor([3, 1, 3, 30]))
    same(taken, tree.rows(new, torch.tensor([3, 1, 3, 0])))
    assert all(leaf.is_contiguous() for leaf in taken.values()), "as those of a tree in memory are"
    same(rows.take(torch.tensor([], dtype=torch.long)), tree.rows(new, slice(0, 0)))


def test_what_counts_of_several_segments_is_merged(tmp_path):
    rows, ids = Store(0, tmp_path).rows({"w": torch.zeros(3)}, 30), torch.arange(30)
    for start in (0, 10, 20):
        rows = rows.put(ids[start : start + 10], {"w": torch.full((10, 3), 1.0 + start)})
    rows = rows.put(ids[ids % 10 > 1], {"w": torch.full((24, 3), 7.0)})
    (number,) = rows.segments.keys() - {FIRST}
    assert rows.segments[number].size == 30
    assert torch.equal(rows.take(ids)["w"][:, 0], torch.where(ids % 10 > 1, 7.0, 1.0 + ids // 10 * 10))


def test_a_file_is_closed_when_its_rows_are_dropped(tmp_path):
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs Linux's list of open files")

    def opened():
        names = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum(".rows-" in name and str(tmp_path) in name for name in names)

    rows = Store(0, tmp_path).rows({"w": torch.zeros(10)}, 100).put(torch.arange(9), {"w": torch.ones(9, 10)})
    assert opened() == 1
    rows = rows.put(torch.arange(10), {"w": torch.ones(10, 10)})
    gc.collect()
    assert opened() == 1
    del rows
    gc.collect()
    assert opened() == 0


def test_rows_in_memory_are_given_back_to_the_system():
    """Whatever lies among them: on the heap, small things that stay would keep holes between them."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs Linux's account of memory")

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    keep_freed_memory()  # as in the command's process, where it would matter most
    held, small, rows = [], [], {"w": torch.ones(100, 25_000)}
    before = resident()
    for _ in range(20):
        held.append(paged_rows.flatten(rows))
        small.append(torch.ones(1000))
    assert resident() - before > 150
    held.clear()
    assert resident() - before < 30  # of 200 MB; on the heap, 60 stayed


def test_a_file_that_lost_its_end_is_told_in_words(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "rows.safetensors"
    save_file({"float32": torch.ones(4, 100)}, path)
    rows = InFile(path)
    os.truncate(path, path.stat().st_size - 4)
    assert rows.row("float32", 2).view("float32").tolist() == [1.0] * 100
    with pytest.raises(CheckpointError, match="shorter than it was"):
        rows.row("float32", 3)


def test_few_rows_stay_a_tree():
    assert not isinstance(Store(10**9).rows(first(), SIZE), Paged)
    assert isinstance(Store(10**3).rows(first(), SIZE), Paged), "memory bounds them, however few"
    assert Store(10**3).rows((), SIZE) == ()


def test_a_full_disk_is_told_in_words(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(paged_rows, "save_file", full)
    rows = Store(0, tmp_path).rows(first(), SIZE)
    with pytest.raises(CheckpointError, match=r"clients' states cannot be written.*No space left"):
        rows.put(torch.arange(3), some(3, torch.Generator().manual_seed(0)))
    assert not list(tmp_path.iterdir())


def test_a_segment_that_has_a_file_is_read_from_it(tmp_path):
    from safetensors.torch import save_file

    flat = paged_rows.flatten(some(3, torch.Generator().manual_seed(0)))
    path = tmp_path / "rows.safetensors"
    save_file(flat, path)
    segment = Segment(InMemory(flat), path)
    segment.page_out(tmp_path)
    assert not segment.in_memory
    same(segment.rows.flat, flat)
    assert list(tmp_path.iterdir()) == [path]
