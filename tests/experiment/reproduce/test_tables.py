import dataclasses

import numpy as np
import pytest

from coterie.core.errors import ConfigError
from coterie.experiment.reproduce.names import chosen, find_table
from coterie.experiment.reproduce.papers import TABLES, fedamp, federico, fedmap, pfedbred, pfedvmp
from coterie.experiment.reproduce.running import Request
from coterie.methods import METHODS
from coterie.methods.fields import values_of

from .kit import small_table


def test_every_row_of_every_table_is_a_run_that_could_begin():
    for name, table in TABLES.items():
        for size in table.sizes():
            for entry in table.entries if size == "full" else table.entries[:1]:
                config = Request(table, size).config(entry, 0)
                assert config.seed == 0, name
                assert config.rounds % config.evaluate_every == 0, (
                    name
                )  # so that the last round is one of those compared


def test_tables_have_one_local_row_at_equal_steps_and_labels_of_their_own():
    for name, table in TABLES.items():
        assert sum(entry.equal_steps for entry in table.entries) == 1, name
        assert table.small is None or table.minutes_at("small") < table.minutes_at("full"), name
        labels = [entry.label for entry in table.entries]
        assert len(set(labels)) == len(labels), name
        assert table.seeds >= 3, name
        assert table.small_seeds >= 3, name
        assert table.small is None or table.small_words, name
        if table.variant_of:
            assert TABLES[table.variant_of[0]].variant_of is None, name


def test_federicos_rows_are_the_papers_and_the_librarys_own():
    request = Request(TABLES["federico-1-cifar10-4"], "small")
    paper, library = (request.config(entry, 0).hyper for entry in request.table.entries[-2:])
    assert library == values_of(METHODS["federico"]())
    assert {key for key in paper if paper[key] != library[key]} == {"m_step"}


def test_the_small_size_changes_all_rows_alike():
    for name, table in TABLES.items():
        for key, value in (table.small or {}).items():
            assert {str(table.settings_of(entry, "small")[key]) for entry in table.entries} == {str(value)}, name


# What the paper prints after FedMAP's number of each client: its gain over Individual.
GAINS = {
    "label": (1.71, 0.49, 0.98, 1.17, 1.05, 10.30, 15.51, 19.74, 19.50, 11.64),
    "feature": (3.01, 2.70, 2.94, 1.63, 1.94, 3.12, 3.07, 3.17, 1.53, 1.60),
    "quantity": (1.10, 1.54, 1.40, 2.55, 1.76, 3.86, 8.90, 3.27, 7.60, 7.70),
}
# By how much its averages are not those of its ten rows; the rows agree with the gains that it prints.
OFF = {("feature", 0): -0.42, ("feature", 4): -0.08} | {
    ("quantity", which): off for which, off in enumerate((1.10, 0.82, 0.17, 0.19, 0.34))
}


@pytest.mark.parametrize("skew", fedmap.NUMBERS)
def test_fedmaps_clients_agree_with_its_gains_and_averages(skew):
    """A check of the transcription by the paper's own differences and averages."""
    individual, ours = (np.array(fedmap.CLIENTS[skew][which]) for which in (fedmap.INDIVIDUAL, fedmap.FEDMAP))
    assert ours - individual == pytest.approx(np.array(GAINS[skew]), abs=0.011)
    for which, (average, _) in enumerate(fedmap.AVERAGES[skew]):
        if fedmap.CLIENTS[skew][which]:
            off = average - np.mean(fedmap.CLIENTS[skew][which])
            assert off == pytest.approx(OFF.get((skew, which), 0), abs=0.011)


def test_fedmaps_office_clients_average_to_its_printed_averages():
    for (_, _, average, _, _), clients in zip(fedmap.OFFICE, fedmap.OFFICE_CLIENTS, strict=True):
        if clients:
            assert np.mean(clients) == pytest.approx(average, abs=0.011)


def test_pfedbreds_columns_average_to_its_printed_averages():
    """The paper prints the average over eight columns; Sent140, which is not among ours, is given here."""
    for label, sent140, average in (
        *(
            ("FedAvg -G", 70.86, 72.06),
            ("FedAMP -P", 69.83, 81.80),
            ("pFedMe -P", 69.36, 77.61),
            ("FedEM -G", 66.72, 71.88),
        ),
        *(
            ("mh -P", 72.04, 81.47),
            ("mh+FT -P", 71.87, 82.37),
            ("mh+AM -P", 73.68, 83.09),
            ("Per-FedAvg -P", 70.05, 79.47),
        ),
        *(("FedAvg+AM -G", 71.27, 72.80), ("pFedMe+FT -P", 67.82, 79.13), ("pFedMe+AM -P", 70.93, 79.48)),
        *(("Per-FedAvg+FT -P", 70.20, 79.95), ("lg -P", 60.7, 75.3), ("meg -P", 69.4, 77.9)),
    ):
        numbers = [number for number, _ in pfedbred.PAPER[label]]
        assert np.mean([*numbers, sent140]) == pytest.approx(average, abs=0.06), label


def test_numbers_that_the_papers_repeat_agree():
    """pFedVMP's ablations, fairness and penalties have rows of table 1; FedAMP's text names its best."""
    column = dict(zip((label for label, *_ in pfedvmp.METHODS), pfedvmp.COLUMNS["cifar10-50c-dir0.3"], strict=True))
    assert pfedvmp.DEGRADED["dir0.3"][::2] == (column["pFedVMP"], column["FedPer"])
    assert pfedvmp.STRENGTHS[50] == column["pFedVMP"]
    # "outperforms FedProto/MOON/FedCP/GPFL/FedPAC by 14.10/3.05/7.85/3.06/2.69 on Cifar10 in Dir(0.3)"
    gains = [column["pFedVMP"] - column[label] for label in ("FedProto", "MOON", "FedCP", "GPFL", "FedPAC")]
    assert gains == pytest.approx([14.10, 3.05, 7.85, 3.06, 2.69], abs=1e-6)
    best = {key: fedamp.LABELS[int(np.argmax(row))] for key, row in fedamp.PAPER.items() if key[1] == "practical"}
    assert best == {
        ("mnist", "practical"): "SCAFFOLD",
        **{(d, "practical"): "HeurFedAMP" for d in ("fmnist", "emnist", "cifar100")},
    }
    for row in federico.PAPER.values():  # FedeRiCo is best in all nine columns
        assert np.argmax([number for number, _ in row]) == 6


def test_settings_of_a_row():
    table = small_table(small={"rounds": 1, "clients": 3}, small_words="less")
    entry = table.entries[2]
    assert table.settings_of(entry, "full")["mu"] == 0.1
    assert table.settings_of(entry, "small")["rounds"] == 1
    assert table.settings_of(entry, "full", rounds=1)["rounds"] == 1
    assert table.settings_of(table.entries[0], "full", rounds=5)["rounds"] == 1  # never more than it has
    with pytest.raises(ConfigError, match="no small size"):
        small_table().settings_of(entry, "small")
    assert dataclasses.replace(table, minutes=8).minutes_at("full", 1) == 4


def test_names_stand_for_tables():
    assert [name for name, _ in chosen(["pfedvmp-5"], "small")] == ["pfedvmp-5"]
    every = chosen(["all"], "small")
    assert len(every) == len(TABLES)
    minutes = [TABLES[name].minutes_at(size) for name, size in every]
    assert minutes == sorted(minutes)
    assert {size for name, size in chosen(["fedmap"], "small") if name == "fedmap-1"} == {"full"}
    with pytest.raises(ConfigError, match="did you mean 'fedmap-"):
        find_table("fedmap-3")
    with pytest.raises(ConfigError, match="no small size"):
        chosen(["fedmap-1"], "small")
