"""What a site says of itself is believed only if it can be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.deploy import messages
from coterie.deploy.refused import Refused
from coterie.deploy.site_evidence import evidence_of


def test_scores_that_cannot_be_are_refused() -> None:
    ok: dict[str, Any] = {
        **{"run": "r", "life": 1, "round": 1, "sender": "a", "request": "0" * 64, "examples": 40},
        **{"scores": (0.5, 0.6), "errors": (0.1,), "ends": ((-0.1, 0.3),), "differing": (7,)},
    }
    about: Any = (("local", "fedavg"), "auroc", 40)
    assert evidence_of(messages.Judged(**ok), *about).scores["fedavg"] == [0.6]
    wrong = [{"scores": (0.5, 1.1)}, {"errors": (-0.1,)}, {"examples": 41}, {"differing": (41,)}, {"scores": (0.5,)}]
    for change in wrong:
        with pytest.raises(Refused):
            evidence_of(messages.Judged(**{**ok, **change}), *about)
    unknown = evidence_of(messages.Judged(**{**ok, "scores": (0.5, None)}), *about)
    assert np.isnan(unknown.scores["fedavg"]).all()
