"""Tests of vLLM itself exist where it is installed; `make test` installs it."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("vllm") else ["test_vllm_engine.py"]
