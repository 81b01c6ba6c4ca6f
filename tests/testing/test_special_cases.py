"""Every line of docs/methods.md about which method is which other one holds."""

import pytest

from coterie.core.optimizers import SGD
from coterie.methods import METHODS, FedAvg, FedAvgFT, FedBABU, FedProx, Local
from coterie.methods.fields import name_of
from coterie.testing.special_cases import ANY, SPECIAL_CASES, SpecialCase, disagreement


def words(case: SpecialCase) -> str:
    return f"{name_of(case.method)}: {case.when} is {case.what}"


@pytest.mark.parametrize("case", SPECIAL_CASES, ids=words)
def test_both_sides_predict_the_same(case: SpecialCase) -> None:
    assert disagreement(case) < case.tolerance


def test_what_is_not_the_same_is_told() -> None:
    for ours, theirs in ((FedProx(SGD(0.1), mu=0.1), FedAvg(SGD(0.1))), (FedAvg(SGD(0.1)), Local(SGD(0.1)))):
        assert disagreement(SpecialCase(ours, theirs)) > 1e-2


def test_conditions_in_words() -> None:
    assert SpecialCase(FedProx(mu=0.0), FedAvg()).when == "`mu` = 0"
    assert "`alpha` = 0, `adaptive` off, on a model without normalisation layers" in {
        case.when for case in SPECIAL_CASES
    }
    assert SpecialCase(FedBABU(), FedAvgFT(finetune_epochs=5)).what == "`fedavg-ft` with `finetune_epochs` = 5"
    assert all(case.shared for case in SPECIAL_CASES if case.when == "always")
    assert all(name_of(each) in METHODS for case in SPECIAL_CASES for each in (case.method, case.other))
    assert ANY.words == ""
