"""Passes in which transformers does not read the positions of tokens.

Where a model gets no mask, transformers looks whether positions begin anew somewhere, to make a mask in which packed
sequences do not see each other. Plans of attention (`attention.py`) know that themselves and take no mask, but the CPU
would wait until a GPU has computed all that comes before the pass.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any


class _Here(threading.local):
    unread = False


_here = _Here()


@contextmanager
def unread_positions() -> Iterator[None]:
    """Has transformers take positions for those of one sequence inside the block, in this thread."""
    from transformers import masking_utils

    _ask(masking_utils)
    before, _here.unread = _here.unread, True
    try:
        yield
    finally:
        _here.unread = before


def _ask(library: Any) -> None:
    """Has transformers' function, where there is such a one, ask whether it is to look."""
    look = getattr(library, "find_packed_sequence_indices", None)
    if look is None or hasattr(look, "__wrapped__"):
        return

    @wraps(look)
    def asked(position_ids: Any) -> Any:
        return None if _here.unread else look(position_ids)

    library.find_packed_sequence_indices = asked
