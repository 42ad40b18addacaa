"""Runs the command line as `python -m rollgrad`, where no `rollgrad` is on the path."""

import sys

from rollgrad.entrypoints.cli.main import main

sys.exit(main())
