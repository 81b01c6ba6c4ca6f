"""The door: what arrives is parsed as a typed message and checked before it is used, or `Refused` is raised.

The header has the run, its `life` (how often the server has started), the round, sender, receiver, and the digest of
the body. The header is signed. A body is read only if the header is valid.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch

from coterie.core import tree
from coterie.core.errors import ConfigError
from coterie.core.tree import Tree
from coterie.deploy import keys, wire
from coterie.deploy.keys import Identity
from coterie.deploy.messages import TO_SERVER, TO_SITE, Header, M, ToServer, ToSite
from coterie.deploy.refused import Refused
from coterie.deploy.schema import parse
from coterie.deploy.wire import Envelope
from coterie.evaluation.metrics import LARGEST
from coterie.methods.fields import AnyMethod

MAX_HEADER_BYTES = 4 * 2**20


def with_body(message: M, body: bytes) -> M:
    """Return the message with the digest of its body."""
    return message.model_copy(update={"body": wire.digest(body)})


def sign(message: Header, body: bytes, identity: Identity) -> Envelope:
    """Make a signed envelope of a message and its body."""
    data = message.json_bytes()
    return Envelope(data, body, identity.sign(data))


def read_at_server(envelope: Envelope) -> ToServer:
    """Parse the header of a site's message, without verifying the signature."""
    return parse(TO_SERVER, _bounded(envelope))


def read_at_site(envelope: Envelope) -> ToSite:
    """Parse the header of a server's message, without verifying the signature."""
    return parse(TO_SITE, _bounded(envelope))


def verify(envelope: Envelope, header: Header, public: str) -> None:
    """Check that the owner of the key signed the header, and that the body has the signed digest."""
    if not keys.verified(public, envelope.signature, envelope.header):
        raise Refused("bad-signature")
    if wire.digest(envelope.body) != header.body:
        raise Refused("bad-signature", "the body is not the one that was signed")


def open_body(envelope: Envelope, like: Tree) -> Tree:
    """Decode the body, which must have the names, shapes and types of `like`."""
    if len(envelope.body) > wire.limit(like):
        raise Refused("too-large", f"{len(envelope.body)} bytes, but at most {wire.limit(like)} are possible")
    return wire.decode(envelope.body, like)


def check_message(method: AnyMethod, up: Tree, examples: int, norm_bound: float) -> None:
    """Check that a client's message is finite, plausible for its number of examples, and below the norm bound."""
    check_finite(up)
    impossible = method.implausible(up, examples)
    if impossible is not None:
        raise Refused("bad-count", impossible)
    check_norm(up, norm_bound)


def check_norm(content: Tree, norm_bound: float) -> None:
    """Check that the norm of all floating-point values together is not above the bound."""
    floats = (leaf for leaf in tree.leaves(content) if leaf.is_floating_point())
    norm = math.sqrt(sum(float((leaf.double() ** 2).sum()) for leaf in floats))
    if norm > norm_bound:
        raise Refused("norm", f"a norm of {norm:.3g}, above the bound {norm_bound:g}")


def check_combines(method: AnyMethod, server: Tree, index: int, up: Tree) -> None:
    """Check that the method can aggregate the message of client `index`; a failure later would stop the federation."""
    try:
        new = method.aggregate(server, torch.tensor([index]), tree.stack([up]))
    except Exception as error:
        raise Refused("unusable", f"the method cannot combine it: {error}") from error
    check_finite(new)


def combine_usable(ids: list[int], combine: Callable[[list[int]], Tree]) -> tuple[list[int], Tree]:
    """Combine messages of which each could be combined alone; return the senders, and the result.

    If all together fail, those are left out that cannot be combined with the ones before them.

    Raises:
        ConfigError: there are too few for a robust rule; one alone would go unchecked.
    """

    def checked(some: list[int]) -> Tree:
        new = combine(some)
        check_finite(new)
        return new

    try:
        return ids, checked(ids)
    except Exception:
        kept: list[int] = []
        for each in ids:
            with contextlib.suppress(Exception):
                with contextlib.suppress(ConfigError):  # a rule wants more messages before it says anything
                    checked([*kept, each])
                kept.append(each)
        return kept, checked(kept)


def check_finite(content: Tree) -> None:
    """Check that no value is NaN or infinite."""
    for path, leaf in tree.pack(content).items():
        if not bool(torch.isfinite(leaf).all()):
            raise Refused("not-finite", f"'{path}' has NaN or infinite values")


def check_info(info: Tree) -> None:
    """Check that the numbers that a site logs are finite and bounded, so that their averages are finite, too."""
    for path, leaf in tree.pack(info).items():
        if not bool((leaf.double().abs() <= LARGEST).all()):
            raise Refused("not-finite", f"'{path}' has values that are not numbers up to {LARGEST:g}")


def place_of(error: Exception) -> str:
    """Return the kind of an unexpected error and where it was raised, for a log: its text may be data."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" in {trace.tb_frame.f_code.co_name}, line {trace.tb_lineno}"
    return f"{type(error).__name__}{where}"


def _bounded(envelope: Envelope) -> bytes:
    if len(envelope.header) > MAX_HEADER_BYTES:
        raise Refused("bad-header", f"a header of {len(envelope.header)} bytes")
    return envelope.header
