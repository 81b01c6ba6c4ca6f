import pytest

from coterie.core.errors import ConfigError, DataError
from coterie.deploy.site_data import site_data
from coterie.experiment.resolve import resolve


def test_a_sites_own_csv(tmp_path):
    config, _ = resolve({"method": "fedavg", "data": "own"}, own_data=True)
    path = tmp_path / "my.csv"
    path.write_text(
        "age,dose,outcome\n" + "".join(f"{20 + i % 7},{i % 3},{'yes' if i % 2 else 'no'}\n" for i in range(20))
    )
    own = site_data(config, {"data": str(path), "target": "outcome"}, "aachen", None)
    assert own.names == ("aachen",)
    assert own.classes == ("no", "yes")
    assert len(own.split(0).train) + len(own.split(0).validation) + len(own.split(0).test) == 20
    path.write_text("age,outcome\n20,1\n")
    with pytest.raises(DataError, match="no file has a column 'dose'"):
        site_data(config, {"data": str(path), "target": "dose"}, "aachen", None)
    with pytest.raises(ConfigError, match="has no data"):
        site_data(config, {}, "aachen", None)
