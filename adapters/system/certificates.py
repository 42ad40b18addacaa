"""Certificates that clients trust."""

import os
import ssl
from functools import cache

VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Environment variables that name certificates other than the system's."""


@cache
def trusted_certificates() -> ssl.SSLContext:
    """Returns the certificates that clients over HTTP trust, which all of them share: a client that loads its own holds
    the event loop up for a twentieth of a second, and with it all other episodes.

    Raises:
        OSError: they cannot be read, without which no client starts, of plain HTTP neither.
    """
    import httpx2

    try:
        return httpx2.create_ssl_context()
    except OSError as error:  # also of ssl, which names no file
        named = " and ".join(f"{name} is {os.environ[name]!r}" for name in VARIABLES if name in os.environ)
        raise OSError(
            f"the certificates to trust cannot be read ({error.strerror or error}): {named or 'no variable is set'}; "
            f"have {' or '.join(VARIABLES)} name PEM certificates, or unset it"
        ) from error
