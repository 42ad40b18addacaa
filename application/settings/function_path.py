"""Path of a user's function: a Python file, and the function's name in it."""

from attrs import frozen


@frozen
class FunctionPath:
    """`file`, and the `name` of the function in it; None where the file's usual names are looked for."""

    file: str
    name: str | None = None

    @classmethod
    def parse(cls, path: str) -> "FunctionPath":
        """Reads `FILE` or `FILE:NAME`.

        >>> FunctionPath.parse("rewards/math.py:accuracy")
        FunctionPath(file='rewards/math.py', name='accuracy')
        >>> FunctionPath.parse("reward.py")
        FunctionPath(file='reward.py', name=None)
        """
        file, separator, name = path.rpartition(":")
        return cls(file, name) if separator and name.isidentifier() and file.endswith(".py") else cls(path)
