"""Ray whose workers are forks of a process that has made their imports (`tests/script_host.py`).

Run as a script it stands for Ray's `setup_worker.py`, which a raylet starts for each worker; in the fork it runs again.
"""

import json
import os
import sys

SOCKET = "SCRIPT_HOST"
"""The variable that has the path of the host's socket."""
FORKED = "--forked"
"""The first word of this script where it runs in a fork."""


def fork_workers(socket: str) -> None:
    """Makes workers of clusters that this process starts from now on forks, and leaves out Ray's processes that copy
    logs, scale clusters and show them in a browser."""
    from ray._private.parameter import RayParams

    os.environ[SOCKET] = socket
    begin = RayParams.__init__
    mine = {
        "setup_worker_path": os.path.abspath(__file__),
        "include_log_monitor": False,
        "no_monitor": True,
        "include_dashboard": False,
    }
    RayParams.__init__ = lambda self, *arguments, **settings: begin(self, *arguments, **(settings | mine))


def main(words: list[str]) -> None:
    """Asks the host for the worker, and stands for it."""
    import argparse

    import script_client

    options = argparse.ArgumentParser(allow_abbrev=False)
    options.add_argument("--language")
    options.add_argument("--serialized-runtime-env-context", default="{}")
    own, rest = options.parse_known_args(words)
    os.environ.update(json.loads(own.serialized_runtime_env_context).get("env_vars") or {})
    script_client.main(os.environ[SOCKET], __file__, FORKED, *rest)


def work(words: list[str]) -> None:
    """Becomes the worker."""
    import runpy

    from ray._raylet import Config

    Config.initialize("")  # reads the variables of this process, where Ray has those of the host
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == FORKED:
        work(sys.argv[2:])
    else:
        main(sys.argv[1:])
