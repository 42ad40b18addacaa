"""A disk that is nearly full, as this process sees it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def room_for_files_of(size: int) -> Iterator[None]:
    """Inside, no file of this process can become larger than `size` bytes, and is written up to them."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
