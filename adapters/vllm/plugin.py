"""What vLLM loads in each of its processes: the entry point `rollgrad` of `vllm.general_plugins`."""

BACKEND = "rollgrad"
"""Name of our own weight transfer backend in vLLM."""

_registered = False


def register() -> None:
    """Makes the backend known to this process; may be called again."""
    global _registered
    if _registered:
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from rollgrad.adapters.vllm.receiver import receiver_class

    WeightTransferEngineFactory.register_engine(BACKEND, receiver_class())
    _registered = True
