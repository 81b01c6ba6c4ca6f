"""A site's worker keeps data and model in memory, and answers the site's messages one at a time over a local socket.

The socket is in a folder that only its owner can access.
"""

from __future__ import annotations

import contextlib
import json
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

from coterie.deploy import guard, local_socket, messages
from coterie.deploy.flower import make_site
from coterie.deploy.site import Site
from coterie.deploy.store import Store
from coterie.deploy.wire import Envelope

MASKS = {"key": "made keys for masks", "shared": "shared them", "unmasked": "told shares of what is left in the sum"}


def serve(path: Path, between: Callable[[], None], say: Callable[[str], None]) -> None:
    """Answer messages forever.

    Args:
        path: The socket.
        between: Called between messages, and at least every second.
        say: Called with a line about each message.
    """
    sites: dict[bytes, Site] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(1.0)
        while True:
            between()
            try:
                stream, _ = listener.accept()
            except TimeoutError:
                continue
            with stream, contextlib.suppress(OSError):
                stream.settimeout(60.0)
                about, *envelope = local_socket.read(stream, 4)
                if about not in sites:
                    sites = {about: _site(about)}  # one run at a time
                stream.settimeout(None)
                answer = sites[about].answer(Envelope(*envelope))
                say(_words(sites[about], answer))
                local_socket.write(stream, list(answer))


def _words(site: Site, answer: Envelope) -> str:
    """Describe an answer for the administrator of the site."""
    message = guard.read_at_server(answer)
    run, number, rounds = message.run, message.round, site.config.rounds
    if isinstance(message, messages.Joined):
        return f"{run}: joined"
    if isinstance(message, messages.Refusal):
        return f"{run}: a message was refused ({message.code}); '{site.root / 'site.log'}' says why"
    if isinstance(message, messages.Finished):
        return f"{run}: finished; model, card and report are in '{Store(site.root, run, site.name).path / 'result'}'"
    if isinstance(message, messages.Tried | messages.Judged):
        return f"{run}: looking for a method, message {number} answered"
    stage = f"round {number} of {rounds}" if number <= rounds else "the last evaluation"
    if not isinstance(message, messages.Answer):
        if isinstance(message, messages.Asks | messages.Offers):
            return f"{run}: {stage}, {'asked' if isinstance(message, messages.Asks) else 'answered'} neighbours"
        return f"{run}: {stage}, {MASKS[message.kind]}"
    return f"{run}: {stage} done"


def _site(about: bytes) -> Site:
    run, node = json.loads(about)
    try:
        return make_site(run, node, None, None)
    except Exception as error:
        print(traceback.format_exc(), flush=True)
        raise ConnectionError("the site could not be set up") from error
