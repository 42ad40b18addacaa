"""An agent that is an environment of verifiers, from 0.4 on: the sums of `sums_taskset.py`.

`run_agent.write_rows("rows.jsonl")` writes its tasks for --data.prompt_dataset. Where verifiers is installed in another
Python than rollgrad, that Python is the argument `python`, and this directory is in its PYTHONPATH.
"""

from rollgrad.adapters.agents.verifiers import VerifiersAgent

run_agent = VerifiersAgent("sums_taskset", env_args={"agent": {"runtime": {"type": "subprocess"}}})
