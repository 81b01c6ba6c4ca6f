"""Why a message is refused: a short code, which may be sent to others, and details, which stay in the local log."""

from __future__ import annotations

CODES = {
    "bad-header": "its header is not one that is expected, or has values that cannot be",
    "bad-signature": "its signature is not the sender's",
    "wrong-run": "it belongs to another run",
    "wrong-round": "it is for a round that is not open",
    "wrong-sender": "it does not come from the sender that it names",
    "wrong-receiver": "it is addressed to somebody else",
    "unknown-site": "no site of that name takes part",
    "late": "its round is closed",
    "replay": "it was received before",
    "bad-tree": "its names, shapes or types are not those of the method's message",
    "too-large": "it is larger than the method's message can be",
    "not-finite": "it has NaN or infinite values",
    "bad-count": "it contradicts the site's declaration, for example with more examples than declared",
    "unusable": "the method cannot aggregate it",
    "norm": "its norm is above the bound",
    "not-sealed": "it cannot be opened with the sender's and receiver's keys",
    "range": "a value is too large for the fixed point in which messages are summed, or their weights are too small",
    "masks": "the masks of the round do not allow it: they are of other sites, gone, or were used already",
    "state-lost": "the site no longer has the state that the round starts from",
    "unlike": "the site's data does not match that of the federation",
    "error": "reading it failed unexpectedly; the log of the one who refuses it says where",
    "spent": "it has trained as many rounds as its privacy budget allows",
    "disk": "the site could not read or write its files; its log says why",
    "failed": "the site's own work failed; its log says why",
}


class Refused(Exception):
    """A message is refused. `code` is one of `CODES`; the text is for the log of the one who refuses it."""

    def __init__(self, code: str, words: str = "") -> None:
        assert code in CODES, code
        self.code = code
        super().__init__(words or CODES[code])
