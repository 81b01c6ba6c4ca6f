"""`coterie flower`: its commands, as a new user types them."""

import json
import os
import stat

import pytest
from cryptography import x509

pytest.importorskip("fcntl", reason="the Flower server needs Linux or macOS")

from coterie.cli.flower import require
from coterie.cli.flower.table import ChangeLines, site_table
from coterie.deploy.keys import read_identity, read_keyring
from coterie.deploy.up import app_config
from tests.cli.commands import cli
from tests.deploy.inprocess import TABLE, ledger, make


def test_init_writes_an_app_and_says_how_to_run_it(tmp_path):
    told = cli(
        "flower", "init", "my_federation", "--method", "fedamp", "--data", "digits", "--lam", "0.3", "--sites", "5"
    )
    assert told.exit_code == 0, told.output
    assert "flwr run my_federation local" in told.output
    shown = app_config(tmp_path / "my_federation")
    assert (shown["method"], shown["hyper.lam"], shown["deploy.sites"]) == ("fedamp", 0.3, 5)
    again = cli("flower", "init", "my_federation")
    assert again.exit_code == 2
    assert "already contains an app" in again.output
    wrong = cli("flower", "init", "other", "--method", "fedamp", "--lamb", "1", "--rounds", "0")
    assert wrong.exit_code == 2
    assert "2 problems" in wrong.output
    assert not (tmp_path / "other").exists()
    assert "give the folder of the app first" in cli("flower", "init", "--method", "fedavg").output


def test_certs_are_made_once_and_private_keys_are_private(tmp_path):
    told = cli("flower", "certs", "aachen", "bergen", "--host", "fed.example.org", "--host", "10.0.0.1")
    assert told.exit_code == 0, told.output
    place = tmp_path / "certs"
    for path in (place / "ca.key", place / "server.key", place / "server-app.key", place / "sites" / "aachen.key"):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600, path
    ca, server = (x509.load_pem_x509_certificate((place / f"{name}.crt").read_bytes()) for name in ("ca", "server"))
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1", "127.0.0.1"]
    keys = read_keyring(place / "keys")
    assert keys["aachen"] == read_identity(place / "sites" / "aachen.key").public
    before = (place / "sites" / "aachen.key").read_bytes()
    assert "sites/coimbra.key" in cli("flower", "certs", "aachen", "coimbra").output
    assert (place / "sites" / "aachen.key").read_bytes() == before
    assert "already" in cli("flower", "certs", "aachen").output


def test_what_cannot_be_is_said_in_words(tmp_path, monkeypatch):
    assert "digits has 10 clients" in cli("flower", "up", "--data", "digits", "--sites", "11").output
    assert "fedamp cannot be summed" in cli("flower", "up", "--secure", "--method", "fedamp", "--data", "digits").output
    assert "no deployment.json" in cli("flower", "resume", "nothing").output
    assert "does not exist" in cli("site", "--superlink", "h:1", "--root-certificates", "no", "--key", "no").output
    monkeypatch.setattr(require, "find_spec", lambda name: None)
    for words in (["flower", "up"], ["flower", "certs", "a"], ["flower", "init", "x"], ["flower", "resume", "x"]):
        told = cli(*words)
        assert told.exit_code == 2
        assert "pip install 'coterie[flower]'" in told.output


def test_a_deployed_run_is_not_resumed_as_a_simulation(tmp_path):
    _, server, _ = make("fedavg", tmp_path, reference=False, rounds=1)
    server.run(ledger())
    told = cli("resume", server.out)
    assert told.exit_code == 1
    assert "coterie flower resume" in told.output
    assert "is already complete" in cli("flower", "resume", server.out).output


def test_the_table_of_sites(capsys):
    from rich.console import Console

    console = Console(width=200, markup=False)
    console.print(site_table(TABLE))
    told = capsys.readouterr().out
    for words in ("aachen", "silent", "0.500", "1.20 MB", "0.9 kB", "2 late", "last seen", "accuracy"):
        assert words in told
    changes = ChangeLines(console)
    changes(TABLE)
    changes(TABLE)
    told = capsys.readouterr().out
    assert told.count("round 3 of 4 closed; mean loss 0.5; silent: aachen; refused from aachen: 2 late") == 1


def test_what_follows_the_last_round_is_not_a_round(tmp_path, capsys):
    from rich.console import Console

    shown, console = [], Console(width=200, markup=False)
    _, server, _ = make("fedavg", tmp_path, reference=False, rounds=2)
    book = ledger()
    keep, changes = book.show, ChangeLines(console)

    def show(out, doing=""):
        keep(out, doing)
        shown.append(json.loads((out / "sites.json").read_text()))
        changes(shown[-1])

    book.show = show
    server.run(book)
    assert {each["round"] for each in shown} == {0, 1, 2}
    assert max(site["round"] for each in shown for site in each["sites"].values()) == 2
    words = capsys.readouterr().out
    assert words.count("round 2 of 2 closed") == 1
    assert "round 3" not in words
    assert [line for line in words.splitlines() if "closed" not in line][-2:] == [
        "the last evaluation",
        "sites are writing their models",
    ]
    during = [each for each in shown if each["doing"] == "round 2 of 2"]
    assert {"working", "answered"} <= {site["state"] for each in during for site in each["sites"].values()}
