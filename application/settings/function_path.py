"""Place of a user's function: a Python file or module, and the function's name in it."""

from pathlib import PurePath

from attrs import frozen


def is_module_name(place: str) -> bool:
    """Returns whether a text is the name of a module, and not that of a file.

    >>> is_module_name("my_lib.rewards"), is_module_name("rewards.py"), is_module_name("my_lib/rewards")
    (True, False, False)
    """
    return not place.endswith(".py") and all(part.isidentifier() for part in place.split("."))


@frozen
class FunctionPath:
    """`file`, which may be a module's name, and the `name` of the function in it; None where the usual names are looked
    for."""

    file: str
    name: str | None = None

    @classmethod
    def parse(cls, path: str) -> "FunctionPath":
        """Reads `FILE`, `FILE:NAME`, `MODULE` or `MODULE:NAME`.

        >>> FunctionPath.parse("rewards/math.py:accuracy")
        FunctionPath(file='rewards/math.py', name='accuracy')
        >>> FunctionPath.parse("reward.py")
        FunctionPath(file='reward.py', name=None)
        >>> FunctionPath.parse("my_lib.rewards:accuracy")
        FunctionPath(file='my_lib.rewards', name='accuracy')
        """
        file, _, name = path.rpartition(":")
        named = name.isidentifier() and (file.endswith(".py") or is_module_name(file))
        return cls(file, name) if named else cls(path)

    @property
    def part(self) -> str:
        """Name of this function's reward beside others: the function's, else the file's.

        >>> FunctionPath.parse("rewards/math.py:accuracy").part, FunctionPath.parse("rewards/brief.py").part
        ('accuracy', 'brief')
        >>> FunctionPath.parse("my_lib.rewards").part
        'rewards'
        """
        if self.name is not None:
            return self.name
        return self.file.rpartition(".")[2] if is_module_name(self.file) else PurePath(self.file).stem


def several(paths: str | None) -> list[str]:
    """Returns the places that stand with commas between them.

    >>> several("brief.py, rewards/math.py:accuracy"), several(None)
    (['brief.py', 'rewards/math.py:accuracy'], [])
    """
    return [path.strip() for path in (paths or "").split(",") if path.strip()]
