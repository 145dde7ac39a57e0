"""`free_port`, where processes of a test meet."""

import random
import socket
from contextlib import suppress

_CHOSEN = random.SystemRandom()  # whatever a test has seeded
# Below the ports of outgoing connections (32768 and more on Linux): one of these could take a port that was found free
# before the process that waits for it listens there. gloo's ranks make many of them.
_PORTS = range(15_000, 32_000)


def free_port() -> int:
    """Returns a port of the loopback interface that nobody uses now."""
    while True:
        port = _CHOSEN.choice(_PORTS)
        with socket.socket() as server, suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port
