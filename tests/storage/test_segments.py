"""A run whose clients' states page to disk is the same run: its results, its checkpoints, and going on after a stop."""

import itertools
import json
import shutil

import pytest
import torch

import coterie
from coterie.core import client_rows, tree
from coterie.core.errors import CheckpointError, CoterieWarning
from coterie.experiment.run import run_setup
from coterie.experiment.setup import prepare
from coterie.methods import FedAMP, FedMAP
from coterie.storage import files
from coterie.storage.journal import at_once
from coterie.storage.paged_rows import Paged
from coterie.storage.run_folder import RunFolder
from tests.experiment.conftest import two_kinds
from tests.experiment.test_run import Stop, damage

METHODS = {"fedmap": FedMAP(), "fedamp": FedAMP(neighbours=2)}
PAGED, INMEMORY = "1KB", "2GB"


class Killed(BaseException):
    """Nothing on the way treats it as an error."""


def setup(method="fedmap", memory=PAGED, **settings):
    quick = {"engine": "loop", "compile": False, "workers": 1, "reference": False, "report": False, "batch_size": 8}
    settings = {"rounds": 5, "clients_per_round": 3, "memory": memory, "model": "mlp", **quick, **settings}
    return prepare(METHODS[method], two_kinds(8, 20), **settings)


def views(result):
    return client_rows.take(result.views, torch.arange(len(result.names)))


def equal(a, b):
    ours, theirs = tree.pack(views(a)), tree.pack(views(b))
    return ours.keys() == theirs.keys() and all(torch.equal(leaf, theirs[name]) for name, leaf in ours.items())


def segments(out):
    return {path.name for path in (out / "checkpoints").glob("rows-*")}


def referred(out, round):
    about = json.loads((out / "checkpoints" / f"round-{round:05d}" / "state.json").read_text())
    return {name for rows in about["rows"].values() for name, _ in rows.values()}


@pytest.mark.parametrize("method", METHODS)
def test_paging_changes_no_bit_and_neither_does_a_kill(tmp_path, method):
    dense = run_setup(setup(method, INMEMORY), tmp_path / "dense")
    whole = run_setup(setup(method), tmp_path / "whole")
    assert isinstance(whole.views, Paged)
    assert not isinstance(dense.views, Paged)
    assert equal(dense, whole)
    assert [row["test"] for row in dense.rounds] == [row["test"] for row in whole.rounds]
    assert not segments(tmp_path / "dense")
    with pytest.raises(Killed), at_once():
        run_setup(setup(method, checkpoint_every=2), tmp_path / "cut", progress=Stop(3, Killed))
    # What a kill at any moment may leave: a half-written segment, which goes, and no more.
    (tmp_path / "cut" / "checkpoints" / ".rows-left.tmp").write_text("half")
    resumed = run_setup(setup(method, checkpoint_every=2), tmp_path / "cut", resuming=True)
    assert equal(whole, resumed)
    assert [row["test"] for row in whole.rounds] == [row["test"] for row in resumed.rounds]
    assert not (tmp_path / "cut" / "checkpoints" / ".rows-left.tmp").exists()


def test_checkpoints_share_segments_and_none_is_left_over(tmp_path):
    out = tmp_path / "run"
    written = []

    class Watch(Stop):
        def round(self, record, metric):
            written.append(segments(out))

    with at_once():
        run_setup(setup("fedmap"), out, progress=Watch(0))
    assert all(len(after - before) == 1 for before, after in itertools.pairwise(written))
    kept = RunFolder(out).checkpoints()
    assert referred(out, kept[-1]) & referred(out, kept[-2])
    assert segments(out) == set.union(*(referred(out, round) for round in kept))


def test_a_damaged_segment_is_named_and_the_checkpoint_before_it_used(tmp_path):
    out = tmp_path / "cut"
    whole = run_setup(setup(), tmp_path / "whole")
    with pytest.raises(Killed), at_once():
        run_setup(setup(), out, progress=Stop(4, Killed))
    (own,) = referred(out, 4) - referred(out, 3)
    damage(out / "checkpoints" / own, "flipped")
    with pytest.warns(CoterieWarning, match=rf"round-00004' is not whole: .*{own}' is corrupted"):
        resumed = run_setup(setup(), out, resuming=True)
    assert equal(whole, resumed)


def test_rows_that_are_not_there_are_refused(tmp_path):
    out = tmp_path / "run"
    run_setup(setup(), out)
    last = RunFolder(out).checkpoints()[-1]
    path = out / "checkpoints" / f"round-{last:05d}" / "state.json"
    about = json.loads(path.read_text())
    about["rows"]["clients"].popitem()
    del about[files.OWN_CHECKSUM]  # or it would be refused for that
    path.write_text(json.dumps(about))
    with pytest.warns(CoterieWarning, match="refers to rows that are not there"):
        run_setup(setup(), out, resuming=True)


def test_a_run_that_did_not_page_goes_on_paging_but_not_the_other_way(tmp_path):
    whole = run_setup(setup(), tmp_path / "whole")
    with pytest.raises(Killed), at_once():
        run_setup(setup(memory=INMEMORY), tmp_path / "old", progress=Stop(3, Killed))
    assert equal(whole, run_setup(setup(), tmp_path / "old", resuming=True))
    for older in RunFolder(tmp_path / "whole").checkpoints()[:-1]:
        shutil.rmtree(tmp_path / "whole" / "checkpoints" / f"round-{older:05d}")
    with pytest.raises(CheckpointError, match="clients is paged there and would not be here: use the memory of before"):
        run_setup(setup(memory=INMEMORY), tmp_path / "whole", resuming=True)


def test_newcomers_join_a_paged_run(tmp_path):
    x, y = two_kinds(9, 20)["site-9"]
    found = []
    for memory in (PAGED, INMEMORY):
        out = tmp_path / memory
        run_setup(setup("fedamp", memory, rounds=2), out)
        found.append(views(coterie.onboard(out, (x, y), name="new")))
    torch.testing.assert_close(*found)  # the mean of paged rows, where it begins, is one of means
