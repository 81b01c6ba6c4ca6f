"""What a site refuses, so that a curious server cannot learn more than one sum a round."""

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from coterie.deploy import messages, seal
from coterie.deploy.keys import make_identity
from coterie.deploy.messages import Masking, Member
from coterie.deploy.refused import Refused
from coterie.deploy.secure import masks, shamir
from coterie.deploy.secure.agreement import threshold
from coterie.deploy.secure.at_site import LETTER_BYTES, SiteMasks
from coterie.deploy.secure.fixed_point import Words

NAMES = ("a", "b", "c", "d")
IDENTITIES = {name: make_identity() for name in NAMES}
EXCHANGE = {name: X25519PrivateKey.generate() for name in NAMES}
CARDS = {name: seal.make_card(name, EXCHANGE[name], IDENTITIES[name]) for name in NAMES}
WORDS = masks.stream(bytes(32), 6)
FIRST, SECOND = "1" * 32, "2" * 32


def about(round=1):
    return {"run": "r", "life": 1, "round": round, "receiver": "a", "server": "key"}


class Town:
    """Four sites and what passes between them."""

    def __init__(self, root) -> None:
        self.sites = {name: SiteMasks(root / name, name, IDENTITIES[name], 2 / 3) for name in NAMES}
        self.roster: dict[str, Member] = {}
        self.letters: dict[str, torch.Tensor] = {}

    def keys(self, session=FIRST, round=1):
        for name, site in self.sites.items():
            public, seed, proof = site.keys(messages.Keys(**about(round), session=session))
            self.roster[name] = Member(card=CARDS[name], public=public, seed=seed, proof=proof)

    def shares(self, session=FIRST, round=1):
        for name in NAMES:
            self.letters[name] = self.share(name, self.roster, session, round)

    def share(self, name, roster, session=FIRST, round=1, known=None, pinned=None):
        message = messages.Shares(**about(round), session=session, roster=roster)
        return self.sites[name].shares(message, EXCHANGE[name], known or {}, {} if pinned is None else pinned)

    def masked(self, name, words: Words = WORDS, senders=NAMES, session=FIRST, round=1, change=None):
        others = [each for each in senders if each != name]
        rows = [self.letters[each][sorted({*NAMES} - {each}).index(name)] for each in others]
        message = type("Message", (), {"run": "r", "round": round})
        rows = [change(row) for row in rows] if change else rows
        masking = Masking(session=session, senders=tuple(senders))
        return self.sites[name].masked(message, masking, torch.stack(rows), EXCHANGE[name], words)

    def unmask(self, name, heard, session=FIRST, round=1):
        return self.sites[name].unmask(messages.Unmask(**about(round), session=session, heard=tuple(heard)))


@pytest.fixture
def town(tmp_path):
    town = Town(tmp_path)
    town.keys()
    town.shares()
    return town


def test_thresholds_are_more_than_half():
    assert [threshold(n, 2 / 3) for n in (3, 4, 5, 10, 50)] == [2, 3, 4, 7, 34]
    assert [threshold(n, 0.501) for n in (3, 4, 5, 10)] == [2, 3, 3, 6]
    assert threshold(4, 1.0) == 4


def test_shares_of_the_heard_are_of_seeds_and_of_the_others_of_keys(town):
    for name in NAMES:
        town.masked(name)
    seeds, keys = {}, {}
    for number, name in enumerate(NAMES[:3], 1):
        told = town.unmask(name, "abc")
        for kept, given in zip((seeds, keys), told, strict=True):
            for other, share in given.items():
                kept.setdefault(other, {})[number] = bytes.fromhex(share)
    assert sorted(seeds) == ["a", "b", "c"]
    assert sorted(keys) == ["d"]
    session = masks.Session("r", 1, FIRST)
    for name, shares in seeds.items():
        assert masks.commitment(session, name, shamir.combine(shares)).hex() == town.roster[name].seed
    assert masks.public_half(shamir.combine(keys["d"])).hex() == town.roster["d"].public


def test_no_site_tells_both_shares_of_another(town):
    """First without d, then with it: the seed of d and its key together would uncover what d sent."""
    for name in NAMES:
        town.masked(name)
    first = town.unmask("a", "abc")
    with pytest.raises(Refused, match="both together tell a message"):
        town.unmask("a", "abcd")
    assert town.unmask("a", "cba") == first, "the same again is only told again"
    again = SiteMasks(town.sites["a"].path.parent, "a", IDENTITIES["a"], 2 / 3)  # killed and started again
    with pytest.raises(Refused, match="both together"):
        again.unmask(messages.Unmask(**about(), session=FIRST, heard=("a", "b", "d")))


def test_no_site_takes_part_in_a_round_again_once_it_told_shares(town):
    for name in NAMES:
        town.masked(name)
    town.unmask("a", "abcd")
    with pytest.raises(Refused, match="the masks of round 1 were told already"):
        town.sites["a"].keys(messages.Keys(**about(), session=SECOND))
    with pytest.raises(Refused, match="were used already"):
        town.masked("a")
    town.sites["a"].keys(messages.Keys(**about(2), session=SECOND))  # the next round is another matter
    with pytest.raises(Refused, match="no masks of that session"):
        town.unmask("a", "abcd")
    with pytest.raises(Refused, match="were told already"):
        town.sites["a"].keys(messages.Keys(**about(1), session=FIRST))


def test_masks_are_used_for_one_message(town):
    """Two messages under the same masks would tell their difference."""
    first = town.masked("a")
    assert torch.equal(town.masked("a"), first), "the same message again: the site was killed, and trained it again"
    with pytest.raises(Refused, match="were used already"):
        town.masked("a", words=WORDS + WORDS)
    with pytest.raises(Refused, match="were used already"):
        town.masked("a", senders="abc")


def test_a_sum_of_few_is_not_helped(town):
    with pytest.raises(Refused, match="2 of 4 sites, where 3 are needed"):
        town.masked("a", senders="ab")
    for name in NAMES:
        town.masked(name)
    for heard, words in (("ab", "a sum of 2 sites"), ("bcd", "other sites"), ("abx", "other sites"), ("aab", "other")):
        with pytest.raises(Refused, match=words):
            town.unmask("a", heard)
    with pytest.raises(Refused, match="no masks of that session"):
        town.unmask("a", "abc", session=SECOND)


def test_a_roster_must_be_signed_complete_and_its_own(tmp_path):
    town = Town(tmp_path)
    town.keys()
    stranger = town.roster["b"].model_copy(update={"public": town.roster["c"].public})
    cases = [
        ({name: town.roster[name] for name in "ab"}, "a roster of 2 sites"),
        ({name: town.roster[name] for name in "bcd"}, "another key for this site"),
        ({**town.roster, "b": stranger}, "the same key"),
        ({**town.roster, "b": town.roster["b"].model_copy(update={"seed": "0" * 64})}, "'b' are not signed by it"),
        ({**town.roster, "b": town.roster["b"].model_copy(update={"card": CARDS["c"]})}, "not signed by it"),
    ]
    for roster, words in cases:
        with pytest.raises(Refused, match=words):
            town.share("a", roster)
    with pytest.raises(Refused, match="the key of 'b' is not the one known"):
        town.share("a", town.roster, known={"b": IDENTITIES["c"].public})
    other = seal.make_card("b", EXCHANGE["b"], make_identity())
    with pytest.raises(Refused, match="the key of 'b' is not the one known"):
        town.share("a", town.roster, pinned={"b": other})
    with pytest.raises(Refused, match="there is no key for 'd'"):
        town.share("a", town.roster, known={name: IDENTITIES[name].public for name in "abc"})
    pinned = {}
    town.share("a", town.roster, pinned=pinned)
    assert pinned.keys() == {*NAMES}
    with pytest.raises(Refused, match="another roster"):
        town.share("a", {name: town.roster[name] for name in "abc"})


def test_a_letter_that_cannot_be_opened_costs_its_share_only(town):
    for name in NAMES:
        town.masked(name, change=(lambda row: row ^ 1) if name == "b" else None)
    assert town.unmask("a", "abcd")[0].keys() == {*"abcd"}
    assert town.unmask("b", "abcd")[0].keys() == {"b"}


def test_letters_are_for_one_session_and_receiver(town):
    assert town.letters["a"].shape == (3, LETTER_BYTES)
    route = seal.Route("r", 1, "a", "b", f"shares {FIRST}")
    card = CARDS["a"].exchange
    assert len(seal.unseal(bytes(town.letters["a"][0].tolist()), EXCHANGE["b"], card, route)) == 2 * shamir.SHARE_BYTES
    for other, receiver in ((route, "c"), (seal.Route("r", 1, "a", "b", f"shares {SECOND}"), "b")):
        with pytest.raises(Refused):
            seal.unseal(bytes(town.letters["a"][0].tolist()), EXCHANGE[receiver], card, other)


def test_a_damaged_file_is_told(town):
    town.sites["a"].path.write_text("{")
    with pytest.raises(Exception, match=r"masks\.json' cannot be read; without it"):
        town.unmask("a", "abcd")
