"""Addresses of servers, as users write them."""

from urllib.parse import urlsplit


def address_problem(url: str, setting: str) -> str | None:
    """Returns why no request can be sent to `url`, as a sentence that names the setting it is of; None if one can."""
    if not url.startswith(("http://", "https://")):
        return f"{setting} is {url!r}, but a server's address starts with http:// or https://: correct --{setting}."
    problem = None
    try:
        parts = urlsplit(url)
        if not parts.hostname:
            problem = "has no host"
        elif parts.port == 0:
            problem = "has port 0"
        elif not url.isprintable() or " " in url:
            problem = "has a space or a control character"
    except ValueError as error:  # brackets that do not match, a port that is no number or above 65535
        problem = f"is no address ({error})"
    if problem is None:
        return None
    return f"{setting} is {url!r}, which {problem}: write http://HOST:PORT, the port from 1 to 65535, in --{setting}."
