"""vLLM: a rollout engine, and the way of weights to its processes.

Where to begin: `engine.py`, whose `CoreEngine` is the port `RolloutEngine` wherever vLLM runs. What is vLLM's own is
behind a `Core` (`core.py`): `async_llm.py` has it in processes of this machine, which `launch.py` starts, `lora.py` the
same with an adapter alone, and `adapters/engines/vllm_server` behind a URL.

In vLLM's workers, `plugin.py` registers the rest. `weight_receiver.py` takes weights as a transfer brings them;
`loading_plan.py` knows where each tensor goes, `layer_loading.py` writes whole tensors there, and `layer_changes.py`
what changed in them. `loaders.py`, and the three modules of repairs, mend single models and calls of this vLLM.
"""
