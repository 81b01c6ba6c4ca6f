import pytest

from .inprocess import IDENTITIES, NAMES, Rules, ledger, make


def test_who_may_join(tmp_path):
    """With keys at hand, a name belongs to its key, and nobody else comes in."""
    _, server, _queue = make("fedavg", tmp_path, Rules(sites=4, joining=5), reference=False)
    server.known = {name: IDENTITIES[name].public + " a comment" for name in NAMES if name != "d"}
    server.known["c"] = IDENTITIES["stranger"].public
    from coterie.core.errors import CoterieError

    with pytest.raises(CoterieError, match=r"2 of 4 sites joined within 5 seconds \(a, b\).*refused") as caught:
        server.run(ledger())
    assert "unknown-site" in str(caught.value)
    assert "bad-signature" in str(caught.value)
