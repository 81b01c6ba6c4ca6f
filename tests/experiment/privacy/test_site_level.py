"""Messages that are clipped and noised, part by part."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.method import CountedParams
from coterie.experiment.privacy.site_level import Part, Shares, parts_of
from coterie.methods import FedAvg, FedMAP, Scaffold
from coterie.methods.fedmap import Up
from coterie.methods.scaffold import Up as Corrected

SENT = {"w": torch.ones(2, 3), "b": torch.zeros(2)}
values = st.floats(width=32, allow_nan=True, allow_infinity=True)


def plain(clip=1.0, noise=0.0, level="site-local", **more):
    return Shares(level, (Part("params", clip, True),), noise, **more)


@settings(max_examples=100, deadline=None)
@given(st.lists(values, min_size=8, max_size=8), st.floats(1e-3, 1e3))
def test_no_message_is_further_from_what_was_sent_than_the_clip(drawn, clip):
    params = {"w": torch.tensor(drawn[:6]).reshape(2, 3), "b": torch.tensor(drawn[6:])}
    found = plain(clip).apply(0, 1, ["a", "b"], SENT, CountedParams(params, torch.tensor([3.0, 900.0])))
    away = torch.cat([found.params["w"] - SENT["w"], (found.params["b"] - SENT["b"])[:, None]], 1)
    assert (away.double().norm(dim=1) <= clip + 3e-7 * (1 + clip)).all()
    assert found.count.tolist() == [1.0, 1.0]  # numbers of examples are not told


def test_no_noise_and_no_clip_change_only_rounding_and_weights():
    torch.manual_seed(0)
    params = {"w": torch.randn(2, 3), "b": torch.randn(2)}
    found = plain(math.inf).apply(0, 1, ["a", "b"], SENT, CountedParams(params, torch.ones(2)))
    for name in params:
        torch.testing.assert_close(found.params[name], params[name])


def test_local_noise_is_in_every_message_and_central_noise_right_in_their_mean():
    sent = {"w": torch.zeros(16, 4000)}
    names, ups = [f"c{i}" for i in range(16)], CountedParams({"w": torch.zeros(16, 4000)}, torch.ones(16))
    local = plain(2.0, 3.0).apply(0, 1, names, sent, ups).params["w"]
    assert float(local.std()) == pytest.approx(2.0 * 3.0, rel=0.02)
    central = plain(2.0, 3.0, "site-central").apply(0, 1, names, sent, ups).params["w"]
    assert float(central.mean(0).std()) == pytest.approx(2.0 * 3.0 / 16, rel=0.04)
    again = plain(2.0, 3.0).apply(0, 1, names[::-1], sent, ups).params["w"]
    assert torch.equal(again.flip(0), local)  # a client's noise is its own
    assert not torch.equal(plain(2.0, 3.0).apply(0, 2, names, sent, ups).params["w"], local)
    system = plain(2.0, 3.0, entropy="system")
    assert not torch.equal(system.apply(0, 1, names, sent, ups).params["w"], local)
    clips = plain(2.0, 3.0, "site-central", clips_only=True).apply(0, 1, names, sent, ups).params["w"]
    assert not clips.any()


def test_every_part_has_its_clip_and_weights_that_depend_on_losses_are_parts():
    theta = {"w": torch.zeros(1, 2)}
    up = Up(theta, torch.tensor([-80.0]), {}, torch.tensor([9.0]))
    one = Up({"w": torch.zeros(2)}, torch.tensor(-80.0), {}, torch.tensor(9.0))
    names = {part.name: part.clip for part in parts_of(FedMAP(weighting="omega"), one, 1.0, 5.0, 7.0)}
    assert names == {"theta": 1.0, "log_weight": 7.0}
    assert [part.name for part in parts_of(FedMAP(), up, 1.0, 5.0, 7.0)] == ["theta"]
    parts = parts_of(FedMAP(weighting="omega"), one, 1.0, 5.0, 7.0)
    found = Shares("site-local", parts, 0.0).apply(0, 1, ["a"], theta, up)
    assert float(found.log_weight) == pytest.approx(-7, rel=1e-4)
    assert (
        float(Shares("site-local", parts_of(FedMAP(), up, 1, 5, 7), 0.0).apply(0, 1, ["a"], theta, up).log_weight) == 0
    )
    change = Corrected({"w": torch.zeros(1, 2)}, {"w": torch.ones(1, 2)})
    parts = {part.name: part.from_sent for part in parts_of(Scaffold(), change, 1.0, 5.0, 7.0)}
    assert parts == {"y": True, "change": False}
    assert [part.name for part in parts_of(FedAvg(), CountedParams(theta, torch.ones(1)), 1.0, 5.0, 7.0)] == ["params"]
