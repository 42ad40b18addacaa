"""Sections of first light about several processes: of training, and an engine's."""

import importlib.util
import time
from functools import partial
from typing import Any

import torch

from benchmarks.first_light_common import GPU, RUN, batch, free_all, model, ms, policy, step, sync


def divided(out: Any, start: Any, ways: dict[str, Any]) -> None:
    """One process of a group over NCCL: the same step as without one, its time, and that of gathering weights."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start(rank=0, size=1, host="127.0.0.1", port=store.port, local_rank=0, timeout=60)
    b = batch(1, 8, 1024, 1024) if not RUN.tiny else batch(1, 2, 8, 16)
    alone = None
    for name, optimize in {"one process": None, **ways}.items():
        trained = policy(model(), lr=1e-4, **({} if optimize is None else {"optimize": optimize}))
        step(trained, b)
        scores = trained.score(b).logprobs_N
        alone = scores if alone is None else alone
        t = ms(partial(step, trained, b), repeats=2, warm=0)
        t0 = time.perf_counter()
        size = sum(w.nbytes for _, w in trained.weights())
        sync()
        differs = (scores - alone).abs().mean().item()
        out[name] = {
            "ms": round(t, 1),
            "gather_s": round(time.perf_counter() - t0, 2),
            "gib": round(size / 2**30, 2),
            "differs": round(differs, 5),
        }
        assert differs < 0.02, name
        del trained
        free_all()
    torch.distributed.destroy_process_group()


def fsdp2(out: Any) -> None:
    """FSDP2 of torch, in a group of one process."""
    from rollgrad.adapters.models.fsdp.division import start_process_group
    from rollgrad.adapters.models.fsdp.module import FSDPTrainedModule

    ways = {"fsdp2": FSDPTrainedModule, "fsdp2, offloaded": partial(FSDPTrainedModule, offload=True)}
    divided(out, start_process_group, ways)


def deepspeed(out: Any) -> None:
    """DeepSpeed's ZeRO 2 and 3, in a group of one process."""
    from rollgrad.adapters.models.deepspeed.module import DeepSpeedModule
    from rollgrad.adapters.models.deepspeed.processes import start_process_group
    from rollgrad.adapters.models.deepspeed.settings import DeepSpeedSettings

    settings = {"zero 2": DeepSpeedSettings(zero_stage=2), "zero 3": DeepSpeedSettings(zero_stage=3)}
    if GPU:  # compiles an optimizer
        settings["zero 2, offloaded"] = DeepSpeedSettings(zero_stage=2, adam_offload=True)
    divided(out, start_process_group, {name: partial(DeepSpeedModule, division=d) for name, d in settings.items()})


def ipc(out: Any) -> None:
    """Weights to another process on this GPU by handle, unpacked by vLLM's own file."""
    if not GPU or not RUN.packed:
        out["left out"] = "needs a GPU, and vLLM or --vllm-packed"
        return
    import torch.multiprocessing as mp

    mp.set_start_method("spawn", force=True)
    from rollgrad.adapters.models.torch.allocator import let_segments_grow
    from rollgrad.adapters.weights.cuda_ipc import exported

    to, back = mp.Queue(), mp.Queue()
    child = mp.Process(target=_consume, args=(RUN.packed, to, back))
    child.start()
    let_segments_grow()  # as processes of models do, and engines do not
    weights = list(model().state_dict().items())[:-1]  # the head is the embedding
    back.get(timeout=60)
    rounds = []
    for _ in range(3):
        t, size = time.perf_counter(), 0
        for contents, handles in exported(iter(weights)):
            to.put((contents.names, contents.dtype_names, contents.shapes, contents.tensor_sizes, handles))
            sums = back.get(timeout=60)
            assert isinstance(sums, dict), sums
            size += sum(contents.tensor_sizes)
        rounds.append(time.perf_counter() - t)
    named = dict(weights)
    assert all(abs(named[n].double().sum().item() - s) <= 1e-6 * max(1, abs(s)) for n, s in sums.items()), "wrong bytes"
    to.put(None)
    child.join(30)
    out["seconds"] = [round(r, 3) for r in rounds]
    out["gib"], out["gb_s"] = round(size / 2**30, 2), round(size / min(rounds) / 1e9, 1)


def _consume(path: str, to: Any, back: Any) -> None:
    try:
        spec = importlib.util.spec_from_file_location("packed_tensor", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        importer = module.PackedBufferImporter()
        torch.cuda.init()
        back.put("ready")
        while (item := to.get()) is not None:
            names, dtypes, shapes, sizes, handles = item
            tensors = module.packed_ipc_consumer(handles, names, shapes, dtypes, sizes, 0, importer)
            torch.cuda.synchronize()
            back.put({name: t.double().sum().item() for name, t in tensors[-2:]})
    except BaseException as error:
        back.put(f"the other process failed: {type(error).__name__}: {error}")
        raise
