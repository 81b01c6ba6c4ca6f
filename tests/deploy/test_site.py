"""What a site refuses whatever the server asks; rounds are tested in `test_guard.py`, `test_faults.py` and others."""

from typing import Any

import pytest

from coterie.deploy import messages
from coterie.deploy.refused import Refused
from coterie.deploy.site import Site
from coterie.experiment.setup import prepare
from coterie.testing import kit

SEARCH = [messages.Tries, messages.Judge]


def site(*, secure: bool = False, **settings: Any) -> Site:
    found = object.__new__(Site)
    found.config, found.secure = prepare("fedavg", kit.federation(), rounds=1, **settings).config, secure
    return found


@pytest.mark.parametrize("kind", SEARCH)
def test_a_site_whose_messages_are_summed_securely_takes_part_in_no_search(kind: Any) -> None:
    with pytest.raises(Refused, match="nothing else"):
        site(secure=True)._check_promises(kind.model_construct())
    site()._check_promises(kind.model_construct())


@pytest.mark.parametrize("kind", [messages.Ask, messages.Offer, messages.Round])
def test_nor_does_it_write_to_peers(kind: Any) -> None:
    with pytest.raises(Refused, match="nothing else"):
        site(secure=True, topology="ring")._check_promises(kind.model_construct())
    site(secure=True)._check_promises(kind.model_construct())


@pytest.mark.parametrize("kind", SEARCH)
def test_a_private_site_takes_part_in_no_search(kind: Any) -> None:
    with pytest.raises(Refused, match="budget is that of one training"):
        site(privacy="site-local", noise=1.0)._check_promises(kind.model_construct())
    site(privacy="site-local", noise=1.0)._check_promises(messages.Round.model_construct())
