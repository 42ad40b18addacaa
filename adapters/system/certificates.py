"""Certificates that clients trust."""

import ssl
from functools import cache


@cache
def trusted_certificates() -> ssl.SSLContext:
    """Returns the certificates that clients over HTTP trust, which all of them share: a client that loads its own holds
    the event loop up for a twentieth of a second, and with it all other episodes."""
    import httpx2

    return httpx2.create_ssl_context()
