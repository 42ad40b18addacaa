"""Exit statuses of the command line."""

import signal

SIGNAL_STATUS = 128
"""Number added to a signal's number, as in shells' exit codes of killed processes."""
EXIT_DEFECT = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = SIGNAL_STATUS + signal.SIGINT
EXIT_CLOSED = SIGNAL_STATUS + signal.SIGPIPE
