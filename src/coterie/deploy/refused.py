"""Why a message is not taken: a short code that may travel, and words that stay where they are."""

from __future__ import annotations

CODES = {
    "bad-header": "its header cannot be read",
    "bad-signature": "its signature is not the sender's",
    "wrong-run": "it belongs to another run",
    "wrong-round": "it is for a round that is not open",
    "wrong-sender": "it does not come from whom it says",
    "wrong-receiver": "it is addressed to somebody else",
    "unknown-site": "nobody of that name takes part",
    "late": "its round is closed",
    "replay": "it was there before",
    "bad-tree": "names, shapes or types are not those of the method's message",
    "too-large": "it is larger than the method's message can be",
    "not-finite": "it holds NaN or infinite values",
    "bad-count": "it says of the site's data what cannot be, such as more examples than were declared",
    "unusable": "the method cannot combine it with what is there",
    "norm": "its norm is above the bound",
    "not-sealed": "it cannot be opened with the sender's and receiver's keys",
    "state-lost": "the site no longer has the state that the round starts from",
    "unlike": "the site's data does not fit the federation",
    "failed": "the site's own work failed; its log says why",
}


class Refused(Exception):
    """A message that is not taken. `code` is one of `CODES`; the words are for the log of whoever refuses."""

    def __init__(self, code: str, words: str = "") -> None:
        assert code in CODES, code
        self.code = code
        super().__init__(words or CODES[code])
