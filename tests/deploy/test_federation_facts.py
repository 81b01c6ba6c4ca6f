"""What sites declare and a server gathers: shapes, and targets, which are alike at all sites and checked."""

import json

import pytest

from coterie.core.errors import DataError
from coterie.core.targets import Labels, Survival
from coterie.data.sources import SOURCES
from coterie.deploy.federation_facts import (
    Declaration,
    build_task,
    check_facts,
    declare,
    federation_without_data,
    gather_facts,
)
from coterie.deploy.refused import Refused
from coterie.deploy.site_data import one_client
from coterie.experiment.config import Config

from .inprocess import ledger, make
from .test_faults import RULES


def test_sites_whose_data_does_not_fit_are_named(tmp_path):
    _, server, queue = make("fedavg", tmp_path, RULES, reference=False)
    own = queue.sites["c"].data
    queue.sites["c"].data = type(own)(own.name, own.x[:, :3], own.y, own.clients, own.num_classes)
    with pytest.raises(DataError, match=r"site 'c' has inputs of shape \(3,\).*'a' has \(5,\)"):
        server.run(ledger())


def declared(data="survival-times"):
    federation = SOURCES[data].load(data, 0, 0.1, 0.3)
    return {name: declare(one_client(federation, name)) for name in federation.names[:3]}


@pytest.mark.parametrize("data", ["complications", "severity", "survival-times", "wards"])
def test_sites_and_server_build_the_same_task_from_declarations(data):
    federation, sites = SOURCES[data].load(data, 0, 0.1, 0.3), declared(data)
    config = Config(data=data, model="linear")
    facts = gather_facts(
        config, {n: Declaration.model_validate_json(each.model_dump_json()) for n, each in sites.items()}
    )
    assert facts.target == federation.target
    assert build_task(config, "linear", facts).target == federation.target
    assert federation_without_data(config, sites, facts).target == federation.target
    for each in sites.values():
        check_facts(facts, each)


def test_sites_with_other_horizons_are_named_and_refused():
    sites = declared()
    other = json.dumps(Survival((9.0,)).to_json(), sort_keys=True)
    odd = {**sites, "odd": sites["north"].model_copy(update={"task": other})}
    with pytest.raises(DataError, match=r"site 'odd'.*sites need the same columns"):
        gather_facts(Config(data="x"), odd)
    facts = gather_facts(Config(data="x"), sites)
    with pytest.raises(Refused):
        check_facts(facts, odd["odd"])


@pytest.mark.parametrize(
    "text",
    [
        "magic",
        "[]",
        "{}",
        '{"kind": "survival", "times": [2, 1]}',
        '{"kind": "ordinal", "levels": 1e99}',
        "[" * 50_000,
        json.dumps(Labels(tuple(map(str, range(3)))).to_json()).replace('"0"', '"1"'),
    ],
)
def test_a_target_that_is_none_is_refused(text):
    values = json.loads(declared()["north"].model_dump_json()) | {"task": text}
    with pytest.raises(ValueError, match="no target"):
        Declaration.model_validate_json(json.dumps(values))
