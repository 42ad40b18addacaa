"""The command line `rollgrad`. It imports the commands inside `main` alone, so that Ctrl-C ends it quietly meanwhile,
too."""

import sys
from collections.abc import Sequence

from rollgrad.entrypoints.cli.exit_status import EXIT_INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (default: that of this process); returns the exit status, of which `commands` tells."""
    try:
        from rollgrad.entrypoints.cli.commands import run_command

        return run_command(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
