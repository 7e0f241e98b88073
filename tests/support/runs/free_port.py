"""A port for a server that a test starts."""

import socket


def free_port() -> int:
    """Return a port of 127.0.0.1 that no program listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
