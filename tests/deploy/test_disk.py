"""Full disks, kills while files are written, damaged files, and who can read what a site and a server write."""

import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
import torch

from coterie.core import tree
from coterie.core.errors import CheckpointError
from coterie.deploy import certs
from coterie.deploy.ledger import Ledger
from coterie.deploy.store import Store
from coterie.storage import files
from coterie.storage.run_folder import RunFolder
from coterie.storage.state import State

from .inprocess import NAMES, ledger, make
from .test_faults import RULES, check


@pytest.fixture
def full(monkeypatch):
    """A function that fills the disk under a folder, and one that makes room again."""
    inside = []
    original = os.replace

    def replace(source, target):
        if any(each in str(target) for each in inside):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(source, target)

    monkeypatch.setattr(files.os, "replace", replace)
    return inside.append, inside.clear


def left_over(folder):
    return list(folder.rglob("*.tmp"))


def test_a_site_whose_disk_is_full_says_so_and_goes_on_when_there_is_room(full, tmp_path):
    fill, make_room = full
    setup, server, queue = make("scaffold", tmp_path, RULES, reference=False)

    def fault(direction, name, round, envelope):
        if (direction, name) == ("to", "b"):
            fill(f"{tmp_path}/b/") if round == 2 else make_room()
        return [envelope]

    queue.fault = fault
    book = ledger()
    result = server.run(book)
    assert book.sites["b"].refused == {"disk": 1}
    assert [len(row["participants"]) for row in result.rounds] == [4, 3, 4]
    assert "No space left on device" in (tmp_path / "b" / "site.log").read_text()
    assert not left_over(tmp_path)
    check(setup, server, queue, book, absent={2: {"b"}})


@pytest.mark.parametrize("file", ["state.safetensors", "state.json", "deployment.json", "sites.json"])
def test_a_server_whose_disk_is_full_stops_in_words_and_resumes(file, full, tmp_path):
    fill, make_room = full
    setup, server, queue = make("scaffold", tmp_path, RULES, reference=False)

    def fault(direction, name, round, envelope):
        if (direction, name, round) == ("from", "a", 2):
            fill(file)
        return [envelope]

    queue.fault = fault
    with pytest.raises(CheckpointError, match="No space left on device"):
        server.run(ledger())
    make_room()
    queue.fault = lambda direction, name, round, envelope: [envelope]
    queue.inbox.clear()
    queue.replies.clear()
    assert not left_over(tmp_path / "run")
    book = Ledger.load(server.out)
    assert book.round == 1
    server.run(book)
    check(setup, server, queue, book)


def state_of(round: int) -> State:
    return State({"w": torch.full((300, 100), float(round))}, {"n": torch.full((50,), round)})


def wait_until_it_worked(child: int, seconds: float) -> None:
    """Wait until a process has had so many seconds of a processor, however busy the machine is."""
    told = Path(f"/proc/{child}/schedstat")
    if not told.exists():
        time.sleep(seconds)
        return
    until = time.monotonic() + 30
    while time.monotonic() < until and int(told.read_text().split()[0]) < seconds * 1e9:
        time.sleep(0.001)


def kill_while(write, number: int, seed: int) -> None:
    """Let a process write rounds without end, and kill it at some moment; again and again."""
    draw = random.Random(seed)
    for _ in range(number):
        if not (child := os.fork()):
            try:
                write()
            finally:
                os._exit(1)
        wait_until_it_worked(child, draw.uniform(0.002, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def check_killed_run(folder, number: int) -> None:
    run = RunFolder(folder)
    like, rounds = state_of(0), []

    def write():
        for round in range(run.load_last(like)[0] + 1, 10**6):
            run.save(round, state_of(round), None)

    for k in range(number):
        kill_while(write, 1, k)
        round, state, _ = run.load_last(like)
        assert all(bool((leaf == round).all()) for leaf in tree.leaves(state)), round
        rounds.append(round)
    assert rounds == sorted(rounds), "what was there once stays"
    assert rounds[-1] > number / 2


def check_killed_store(folder, number: int) -> None:
    store = Store(folder, "run", "a")
    like = {"w": torch.zeros(300, 100)}

    def write():
        for round in range((store.states() or [0])[-1] + 1, 10**5):
            store.save(round, {"w": torch.full((300, 100), float(round))})

    last = 0
    for k in range(number):
        kill_while(write, 1, k)
        round, state = store.load(10**5, like)
        assert bool((state["w"] == round).all())
        assert round >= last
        last = round
    assert last > number / 2


def test_ten_kills_leave_the_old_state_or_the_new(tmp_path):
    check_killed_run(tmp_path / "run", 10)
    check_killed_store(tmp_path / "site", 10)


@pytest.mark.slow
def test_a_hundred_kills_leave_the_old_state_or_the_new(tmp_path):
    check_killed_run(tmp_path / "run", 100)
    check_killed_store(tmp_path / "site", 100)


def spoil(path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    what = draw.choice(("bit", "bit", "bit", "cut", "zeros", "gone"))
    if what == "bit":
        data[at] ^= 1 << draw.randrange(8)
    elif what == "cut":
        del data[at:]
    elif what == "zeros":
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    path.write_bytes(data) if what != "gone" else path.unlink()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("finished")
    _, server, queue = make("scaffold", root, RULES, reference=False)
    server.run(book := ledger())
    RunFolder(root / "plain").save(1, state_of(1), None)
    RunFolder(root / "plain").save(2, state_of(2), 1)
    return root, book, queue


def check_damaged(finished, tmp_path, number: int) -> None:
    """Of each damaged file, what is read is what was written, or it is refused in words."""
    root, book, queue = finished
    draw, refused = random.Random(0), 0
    ledger_file, plain = root / "run" / "deployment.json", root / "plain" / "checkpoints"
    site = Store(queue.sites["a"].root, book.run, "a")
    whole = vars(Ledger.load(root / "run"))
    round = site.states()[-1]
    kept = files.read_checked(site._file("state", round))
    answer = site.last_answer(queue.sites["a"].identity.public)
    for _ in range(number):
        what = draw.choice(("ledger", "checkpoint", "checkpoint", "state", "answer"))
        try:
            if what == "ledger":
                copy = tmp_path / "run"
                shutil.copytree(root / "run", copy, dirs_exist_ok=True)
                spoil(copy / ledger_file.name, draw)
                assert vars(Ledger.load(copy)) == whole
            elif what == "checkpoint":
                copy = shutil.copytree(plain, tmp_path / "plain" / "checkpoints")
                spoil(draw.choice(sorted(copy.glob("round-00002/*"))), draw)
                state, best = RunFolder(tmp_path / "plain").load(2, state_of(0))
                assert best == 1
                assert all(bool((leaf == 2).all()) for leaf in tree.leaves(state))
            else:
                name = "answer.safetensors" if what == "answer" else site._file("state", round).name
                copied = Store(tmp_path / "site", book.run, "a")
                shutil.copytree(site.path, copied.path, dirs_exist_ok=True)
                spoil(copied.path / name, draw)
                if what == "answer":
                    found = copied.last_answer(queue.sites["a"].identity.public)
                    assert found in (None, answer)
                    refused += found is None
                else:
                    found = files.read_checked(copied.path / name)
                    assert found.keys() == kept.keys()
                    assert all(torch.equal(found[key], kept[key]) for key in kept)
        except CheckpointError:
            refused += 1
        for each in ("run", "plain", "site"):
            shutil.rmtree(tmp_path / each, ignore_errors=True)
    assert refused > number / 2


def test_fifty_damaged_files_are_never_silently_wrong(finished, tmp_path):
    check_damaged(finished, tmp_path, 50)


@pytest.mark.slow
def test_a_thousand_damaged_files_are_never_silently_wrong(finished, tmp_path):
    check_damaged(finished, tmp_path, 1000)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(finished, tmp_path):
    root, *_ = finished
    shutil.copytree(root / "plain", tmp_path / "plain")
    path = tmp_path / "plain" / "checkpoints" / "round-00002" / "state.json"
    path.write_text(path.read_text().replace('"best": 1', '"best": 2'))
    with pytest.warns(UserWarning, match="corrupted"):
        round, state, best = RunFolder(tmp_path / "plain").load_last(state_of(0))
    assert (round, best) == (1, None)
    assert bool((state.server["w"] == 1).all())


def test_a_site_whose_state_is_damaged_begins_anew(tmp_path):
    _setup, server, queue = make("scaffold", tmp_path, RULES, reference=False)

    def fault(direction, name, round, envelope):
        if (direction, name, round) == ("to", "d", 3):
            path = next((tmp_path / "d").rglob("state-00002.safetensors"))
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        return [envelope]

    queue.fault = fault
    book = ledger()
    result = server.run(book)
    assert book.sites["d"].refused == {"state-lost": 1}
    assert [len(row["participants"]) for row in result.rounds] == [4, 4, 3]


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_only_the_owner_reads_what_sites_and_servers_write(umask, tmp_path):
    before = os.umask(umask)
    try:
        _setup, server, queue = make("fedavg", tmp_path, RULES, reference=False, rounds=1, report=True)
        with files.private():  # as `run_server` does
            server.run(ledger())
        certs.make(tmp_path / "certs", ["host"], ["a"], 3)
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    places = [server.out, *(queue.sites[name].root for name in NAMES)]
    for path in [each for place in places for each in (place, *place.rglob("*"))]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    for path in (tmp_path / "certs").rglob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


@pytest.fixture
def small_disk(tmp_path):
    """A function that puts a folder on a disk of its own, of so many kilobytes; it returns the folder."""
    mounted = []

    def mount(name: str, kilobytes: int):
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except OSError as error:
            pytest.skip(f"no tmpfs can be mounted here: {error}")
        if done.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(
            ["umount", "-l", str(folder)], check=True, timeout=10
        )  # tensors that were read are in its memory


def fill_up(folder):
    """Fill the disk under a folder to the last byte; return the file that does."""
    path, chunk = folder / "filler", 2**16
    with path.open("wb", buffering=0) as file:
        while chunk:
            try:
                file.write(b"x" * chunk)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                chunk //= 2
    return path


def test_a_checkpoint_on_a_disk_that_is_really_full_leaves_the_old_one(small_disk):
    """A disk of 1 MB, checkpoints of 120 kB: it fills up while one is written, and again and again."""
    run, like = RunFolder(small_disk("run", 1024)), state_of(0)
    run.save(1, state_of(1), None)
    run.save(2, state_of(2), 1)
    filler = fill_up(run.path)
    for room in range(0, 400_000, 20_000):  # from none at all to enough
        os.truncate(filler, max(filler.stat().st_size - 20_000, 0) if room else filler.stat().st_size)
        try:
            run.save(3, state_of(3), 1)
        except CheckpointError as error:
            told = str(error)
        else:
            assert room > 100_000, "there was no room"
            break
        assert "No space left on device" in told
        assert room < 300_000, "there was room"
        round, state, best = run.load_last(like)
        assert (round, best) == (2, 1)
        assert all(bool((leaf == 2).all()) for leaf in tree.leaves(state))
        assert not left_over(run.path)
    assert run.load_last(like)[0] == 3


@pytest.mark.slow
def test_a_server_on_a_small_disk_stops_in_words_and_resumes(small_disk, tmp_path):
    setup, server, queue = make("scaffold", tmp_path, RULES, reference=False)
    filler = []

    def fault(direction, name, round, envelope):
        if (direction, name, round) == ("from", "a", 2) and not filler:
            filler.append(fill_up(server.out))
        return [envelope]

    small_disk("run", 4096)
    queue.fault = fault
    with pytest.raises(CheckpointError, match="No space left on device"):
        server.run(ledger())
    filler[0].unlink()
    assert not left_over(server.out)
    queue.inbox.clear()
    queue.replies.clear()
    book = Ledger.load(server.out)
    assert book.round == 1
    server.run(book)
    check(setup, server, queue, book)


def test_a_site_on_a_small_disk_says_so_and_goes_on_when_there_is_room(small_disk, tmp_path):
    setup, server, queue = make("scaffold", tmp_path, RULES, reference=False)
    filler = []

    def fault(direction, name, round, envelope):
        if (direction, name, round) == ("to", "b", 2):
            filler.append(fill_up(tmp_path / "b"))
        if (direction, name, round) == ("to", "b", 3):
            filler[0].unlink(missing_ok=True)
        return [envelope]

    small_disk("b", 4096)
    queue.fault = fault
    book = ledger()
    result = server.run(book)
    assert book.sites["b"].refused == {"disk": 1}
    assert [len(row["participants"]) for row in result.rounds] == [4, 3, 4]
    assert not left_over(tmp_path)
    check(setup, server, queue, book, absent={2: {"b"}})
