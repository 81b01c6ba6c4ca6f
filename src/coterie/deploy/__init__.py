"""Runs the methods on real machines: sites keep their data and state, and a server or a relay connects them.

Only `flower` and `client_app` depend on Flower, which carries the messages. The rest is independent of the transport:
the format of a message (`wire`), its signature and checks (`keys`, `guard`), what a site keeps (`store`) and does
(`site`), what the server does (`server`, `ledger`), and mail between peers (`seal`, `peer_mail`, `relay`).
"""
