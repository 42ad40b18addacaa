"""Prints what a dry run found, in one order for all commands: the verdict, what was found, the settings that differ
from the defaults, and the verdict again, before the problems."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import attrs
from rich.console import Console
from rich.text import Text

from rollgrad.domain.errors import RollgradError, problem_lines, raise_together
from rollgrad.entrypoints.config_io import changed_settings
from rollgrad.entrypoints.terminal_text import without_commands

Made = TypeVar("Made")

FINE = "Nothing that a dry run checks would stop this run."


class Findings:
    """Collects all problems of a run, and what else a dry run finds.

    Args:
        errors: problems that are known already.
    """

    def __init__(self, errors: Sequence[RollgradError]) -> None:
        self.errors = [*errors]
        self.console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)

    def attempt(self, make: Callable[[], Made]) -> Made | None:
        """Returns the result of `make`; None if it fails, which is noted."""
        try:
            return make()
        except RollgradError as error:
            self.errors.append(error)
        except Exception:
            if not self.errors:  # otherwise it may follow from an earlier problem
                raise
        return None

    def say(self, text: str) -> None:
        """Prints a sentence, or any other text as it is but for commands to the terminal."""
        self.console.print(Text(without_commands(text)))

    @contextmanager
    def told(self, run: attrs.AttrsInstance, defaults: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Has what is printed inside stand in its place, with the settings of `run`. `defaults`: settings by their
        dotted names that are not set, and what they are then.

        Raises:
            RollgradError: all problems together.
        """
        try:
            with self.console.capture() as found:
                yield
        except RollgradError as error:
            self.errors.append(error)
        except BaseException:
            self.console.file.write(found.get())
            raise
        problems = self._problems()
        count = f"{problems} {'problem' if problems == 1 else 'problems'} would stop this run"
        self.say(f"{count}, named at the end." if problems else FINE)
        self.say("")
        self.console.file.write(found.get())
        self.say("")
        self.say("Settings that differ from the defaults (all of them: --print_config):")
        unset = [f"{name}: {value} (by default)" for name, value in (defaults or {}).items()]
        self.say("\n".join([settings_text(run), *unset, ""]))
        self.say(f"{count}:" if problems else FINE)
        self.console.file.flush()
        raise_together(self.errors)

    def _problems(self) -> int:
        return len({line for error in self.errors for line in problem_lines(error)})


def settings_text(run: attrs.AttrsInstance) -> str:
    """Returns the settings that differ from the defaults, one a line, by their dotted names, values as JSON.

    >>> from rollgrad.application.settings.run import RLConfig
    >>> run = RLConfig()
    >>> run.actor.model_name_or_path, run.rollout.stop_strings = "my/model", ("A:",)
    >>> print(settings_text(run))
    actor.model_name_or_path: "my/model"
    rollout.stop_strings: ["A:"]
    """
    return "\n".join(_lines(changed_settings(run), ""))


def _lines(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _lines(value, f"{prefix}{key}.")
        else:
            text = json.dumps(value, ensure_ascii=False)
            # A path of a command line may be no UTF-8.
            yield f"{prefix}{key}: {text}".encode(errors="backslashreplace").decode()
