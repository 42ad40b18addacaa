"""Words of models, data, servers and programs, as a terminal is to show them."""

CONTROLS = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"},
    127: "\u2421",
    **dict.fromkeys(range(128, 160), "\ufffd"),
}
"""Control characters, by which a text could clear a terminal, rename it, or write to the clipboard, and the pictures
that Unicode has of them."""


def without_commands(text: str) -> str:
    """Returns a text in which a terminal finds no commands: control characters are drawn, as `␛`, but for the ends of
    lines and tabs.

    >>> without_commands("a\\x1b[2Jb\\tc")
    'a␛[2Jb\\tc'
    """
    return text.replace("\r\n", "\n").translate(CONTROLS)
