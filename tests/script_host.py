"""Runs scripts, each in a fork of this process, which has imported what most of them need: imports take longer than the
smallest work of most scripts.

Reads lines of tab-separated words (a file for the output; the path of a script, or `-m` and a module; arguments), and
answers each with the exit status. Nothing has computed before a fork, so that no thread is lost in it.
"""

import os
import runpy
import sys
import traceback
import types
from pathlib import Path

sys.path.pop(0)  # this folder, which Python has put there


def run(words: list[str]) -> int:
    module = words[0] == "-m"
    if module:
        words = words[1:]
    sys.argv = words
    try:
        if module:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            script = types.ModuleType("__main__")
            script.__file__ = words[0]
            # Processes that the script spawns name its classes by the second name.
            sys.modules["__main__"] = sys.modules["__mp_main__"] = script
            exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), script.__dict__)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # as Python itself ends
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    import datasets  # noqa: F401
    import torch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import rollgrad.entrypoints.composition.rl
    import rollgrad.entrypoints.library  # noqa: F401

    for line in sys.stdin:
        output, *words = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            file = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(file, 1)
            os.dup2(file, 2)
            status = 1
            try:
                status = run(words)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
