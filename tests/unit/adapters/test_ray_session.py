"""Variables that a cluster is started with hide GPUs, by Ray's own code."""

import os
from types import SimpleNamespace

import pytest

from rollgrad.adapters.ray.session import VARIABLES


@pytest.mark.parametrize(("own", "visible"), [([], ""), (["3"], "3"), (["3", "5"], "3,5")], ids=str)
def test_a_process_sees_the_gpus_that_it_has_and_no_others(
    own: list[str], visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without any would take NCCL for tensors that are on the CPU."""
    import ray
    from ray._private.utils import set_visible_accelerator_ids

    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": own})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    set_visible_accelerator_ids()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
