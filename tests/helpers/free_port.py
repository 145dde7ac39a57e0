"""`free_port`, where processes of a test meet."""

import socket


def free_port() -> int:
    """Returns a port of the loopback interface that nobody uses now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
