"""docs/methods.md says what the code does."""

import pytest

from coterie import METHODS, testing
from coterie.core.method import CountedParams
from coterie.methods import Ditto, FedAvg, FedProto, Local
from coterie.testing.method_notes import NOTES
from coterie.testing.methods_page import COMMAND, PAGE, SIZES, card, cost, equations, page, paper
from tests.places import ROOT

PARAMETERS = 784 * 100 + 100 + 100 * 10 + 10
# In one process with the other test file that looks at messages, and the costs of all methods: each is found once.
pytestmark = pytest.mark.xdist_group("what methods send")


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / PAGE).read_text() == page(), f"{PAGE} is not up to date: run `{COMMAND}`"


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_note_an_equation_and_a_title(name: str) -> None:
    note, method = NOTES[name], METHODS[name]()
    assert note.use.endswith(".")
    assert note.keeps.startswith("nothing") == (method.init_client(testing.task().init()) == ())
    assert "`" in equations(method)
    assert paper(method).endswith(".")


def test_work_and_bytes_are_those_of_the_network() -> None:
    """A gradient is a product forward, one back for each weight, and one back for the inputs of the second layer."""
    found = cost(FedAvg())
    assert found.work == sum(SIZES) * 2 * (2 * (784 * 100 + 100 * 10) + 100 * 10)
    assert found.up == len(SIZES) * 4 * (PARAMETERS + len(CountedParams._fields) - 1)
    assert found.down == len(SIZES) * 4 * PARAMETERS
    assert found.deploying == 0
    assert cost(Ditto()).work == 2 * found.work
    assert cost(Local()).work == found.work
    assert cost(Local()).up == cost(Local()).down == 0
    assert cost(FedProto()).up < 0.02 * found.up


def test_what_a_card_says() -> None:
    assert card("fedavg-ft").deploying == "1.0"
    assert card("fedamp").down.endswith("each its own")
    assert card("fedavg").down.endswith("the same to all")
    assert card("federico").up.endswith("to the owners of the models that it was sent")
    assert card("fedfomo").up.endswith("its affinities; to the server")
