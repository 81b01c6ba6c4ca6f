import pytest

from coterie.data.download.catalogue import DOWNLOADS
from coterie.data.download.fetch import DownloadRoute, Remote


def test_every_route_has_checksums():
    for _, routes in DOWNLOADS.values():
        for route in routes:
            assert isinstance(route, DownloadRoute)
            assert all(len(md5) == 32 and int(md5, 16) for md5 in route.members.values())
            if route.tool is None:
                for remote in route.remotes():
                    assert isinstance(remote, Remote)
                    assert remote.url.endswith(remote.file)
                    assert len(remote.digest) == 32


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_the_authors_come_before_packages(name):
    first, *rest = DOWNLOADS[name][1]
    assert first.tool is None
    assert all(remote.url.startswith("http") for remote in first.remotes())
    assert [route.tool for route in rest] in (["npm"], ["apt-get"])
