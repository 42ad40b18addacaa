"""Processes that show runs, without pandas. Importable without torch."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder


class WithoutPandas(MetaPathFinder):
    """Hides pandas from this process: pyarrow imports it, if there is one, with its first array, which takes 0.2 s of
    CPU and 40 MB, and nothing here needs it."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Leaves all other modules to the finders behind this one.

        Raises:
            ModuleNotFoundError: it is pandas.
        """
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is not needed here.", name=fullname)


@contextmanager
def without_pandas() -> Iterator[None]:
    """Hides pandas inside the block, after which pyarrow does not look for it again."""
    finder = WithoutPandas()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
