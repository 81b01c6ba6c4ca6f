"""The same methods on real machines: sites that keep their data and state, and a server (or a relay) between them.

Nothing here is imported by the core. What a message is (`wire`), who may send it (`keys`, `guard`), what a site keeps
(`store`) and does (`site`), what the server does (`server`, `ledger`), mail between peers (`seal`, `mailbox`) know no
transport; `flower` carries their envelopes.
"""
