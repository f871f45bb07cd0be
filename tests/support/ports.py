"""Ports of this machine for the servers of tests."""

from __future__ import annotations

import itertools
import os
import socket

# Below the ports that systems give to clients and to servers that ask for any, so that nothing
# takes a port between the choice and the start of the server. Each process of the run has its own;
# other runs at the same time begin elsewhere in them.
_FIRST, _PER_PROCESS = 20_000, 3_000
_PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_numbers = (number % _PER_PROCESS for number in itertools.count(os.getpid()))


def free_port() -> int:
    """A port at which nothing listens, and which this run of the tests did not use lately."""
    while True:
        port = _FIRST + _PROCESS * _PER_PROCESS + next(_numbers)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
