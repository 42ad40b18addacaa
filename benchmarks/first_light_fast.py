"""Sections of first light that say what is fast on one GPU."""

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.first_light_common import (
    DEV,
    DT,
    GPU,
    RUN,
    allocated,
    batch,
    engine_of,
    forget_peak,
    free_all,
    graphs_of,
    matmul_flops,
    model,
    ms,
    peak_gib,
    planned_gib,
    play,
    policy,
    reserved_gib,
    same,
    step,
    sync,
    use,
)


def attention_is_fast(out: Any) -> None:
    """One layer's attention of a group: 8 replies of 2048 behind a prompt of 1024, Qwen3's heads, in ms."""
    from rollgrad.adapters.models.torch.kernels.determinism import compute_deterministically
    from rollgrad.adapters.models.torch.kernels.score_form import ScoreForm
    from rollgrad.adapters.models.torch.layers.attention import ForestAttention
    from rollgrad.adapters.models.torch.layers.layout import Node

    n, p, r = (8, 1024, 2048) if not RUN.tiny else (2, 16, 32)
    nodes = [Node(0, p), *(Node(p + i * r, r, ((0, p),)) for i in range(n))]
    total = p + n * r
    leaves: list[Any] = [torch.randn(1, h, total, 128, device=DEV, dtype=DT, requires_grad=True) for h in (16, 8, 8)]
    g = torch.randn(1, total, 16, 128, device=DEV, dtype=DT)
    pairs = p * p / 2 + n * (r * p + r * r / 2)
    flops = 3.5 * 4 * pairs * 16 * 128
    ways = ("varlen", "buckets", "varlen, deterministic", "buckets, deterministic") if GPU else ("buckets",)
    for name in ways:
        kind, _, exact = name.partition(", ")
        use(kind)
        if exact:
            compute_deterministically()
        plan = ForestAttention(nodes, device=DEV, dtype=DT)

        def work(plan: Any = plan) -> None:
            for leaf in leaves:
                leaf.grad = None
            plan.attend(0, *leaves, ScoreForm(128**-0.5)).backward(g)

        try:
            forget_peak()
            t0 = time.perf_counter()
            work()
            sync()
            first = time.perf_counter() - t0
            before = [leaf.grad for leaf in leaves]
            t = ms(work)
            out[name] = {
                "ms": round(t, 2),
                "first_ms": round(1e3 * first, 1),
                "tflops": round(flops / t / 1e9, 1),
                "peak_gib": round(peak_gib(), 2),
                "same_bits": all(torch.equal(one, leaf.grad) for one, leaf in zip(before, leaves, strict=True)),
            }
        except torch.OutOfMemoryError as error:
            out[name] = f"out of memory: {str(error)[:80]}"
    exact_ways = [out[name] for name in ways if "deterministic" in name]
    assert all(isinstance(found, str) or found["same_bits"] for found in exact_ways)


def head(out: Any) -> None:
    """token_logprobs forward + backward by chunk size; floor: 8 x V x H x A FLOPs."""
    from rollgrad.adapters.models.torch.heads import chunked_logprobs as module

    a, h, v = (16384, 1024, 151936) if not RUN.tiny else (64, 32, 512)
    x = torch.randn(a, h, device=DEV, dtype=DT, requires_grad=True)
    w = (torch.randn(v, h, device=DEV) * 0.02).to(DT).requires_grad_()
    t = torch.randint(0, v, (a,), device=DEV)
    out["floor_ms"] = round(1e3 * 8 * a * h * v / matmul_flops(), 1)
    own = module.chunk_bytes(DEV)
    out["own_mib"] = own / 2**20
    for size in (64 * 2**20, 256 * 2**20, 1024 * 2**20, own):
        module.chunk_bytes = lambda device, size=size: size

        def work() -> None:
            x.grad = w.grad = None
            logprobs, entropy = module.token_logprobs(x, w, None, t, 1.0)
            (logprobs.sum() + 0.0 * entropy.sum()).backward()

        forget_peak()
        out[f"{size / 2**20:.0f} MiB"] = {"ms": round(ms(work, repeats=3, warm=1), 1), "peak_gib": round(peak_gib(), 2)}


def update(out: Any) -> None:
    """Whole optimizer steps of one process: tokens a second, share of an H100's 989 TFLOP/s, memory; and whether all
    ways to keep activations, and to take memory, have the same gradients."""
    from rollgrad.adapters.models.torch.allocator import let_segments_grow
    from rollgrad.application.settings.sections.actor import Checkpointing

    ways = {"kept": Checkpointing.OFF, "selective": Checkpointing.SELECTIVE, "checkpointed": Checkpointing.FULL}
    for way, kind in ways.items():
        _updates(out, way, model(), gradient_checkpointing=kind)
    _updates(out, "offloaded", model(), gradient_checkpointing=Checkpointing.FULL, offload_activations=True)
    for way, kind in {**ways, "offloaded": Checkpointing.FULL}.items():
        for name, (_, samples, prompt, reply) in _shapes().items():
            if samples == 1 or RUN.tiny:  # the plan counts a prompt as often as it has replies
                planned = planned_gib(samples, prompt, reply, kind, offloads=way == "offloaded")
                out[f"{name}; {way}; planned_gib"] = round(planned, 1)
    let_segments_grow()
    _updates(out, "kept, segments grow", model())
    norms: dict[str, list[float]] = {}
    for key, found in out.items():
        if isinstance(found, dict):
            norms.setdefault(key.partition(";")[0], []).append(found["grad_norm"])
    assert all(max(each) < 1.02 * min(each) for each in norms.values()), norms


def compiled(out: Any) -> None:
    """Optimizer steps as in `update` with compiled layers, and the time that compiling takes."""
    from rollgrad.adapters.models.torch.compiling import compile_layers

    if RUN.tiny and not GPU:
        out["left out"] = "takes a CPU a minute"
        return
    made = model()
    compile_layers(made)
    trained, began = policy(made), time.perf_counter()
    step(trained, batch(1, 2, 8, 16))
    out["first step, s"] = round(time.perf_counter() - began, 1)
    _updates(out, "compiled", made, trained)


def fused(out: Any) -> None:
    """Optimizer steps without what a GPU fuses: the numbers of the output embedding, and norms."""
    from rollgrad.adapters.models.torch.kernels import fusing

    made = model()
    trained, is_fused = policy(made), fusing.is_fused
    for way in ("head and norms", "norms alone", "nothing", "head alone"):
        fusing.is_fused = is_fused if "head" in way else lambda device: False
        if way == "nothing":
            for norm in [part for part in made.modules() if "RMSNorm" in type(part).__name__]:
                del norm.forward
        _updates(out, way, made, trained)


def _shapes() -> dict[str, tuple[int, int, int, int]]:
    """Groups, samples of each, and tokens of prompts and replies."""
    if RUN.tiny:
        return {"tiny": (1, 2, 8, 16)}
    return {"1 x 16384": (1, 1, 16, 16368), "8 x 2048, prompt 1024 shared": (1, 8, 1024, 2048)}


def _updates(out: Any, way: str, made: Any, trained: Any = None, **settings: Any) -> None:
    from rollgrad.adapters.models.torch.layers.layout import build_layout

    trained = policy(made, **settings) if trained is None else trained
    body = sum(p.numel() for p in made.base_model.parameters()) - made.get_input_embeddings().weight.numel()
    weight = made.get_output_embeddings().weight.numel()
    for name, shape in _shapes().items():
        b = batch(*shape)
        layout = build_layout(b)
        c = made.config
        pairs = sum(n.length * n.prefix_length + n.length**2 / 2 for n in layout.nodes)
        attn = 3 * 4 * pairs * c.num_attention_heads * c.head_dim * c.num_hidden_layers
        flops = 6 * (body * len(layout.tokens_M) + weight * int(b.action_mask_N.sum())) + attn
        forget_peak()
        key = f"{name}; {way}"
        try:
            t = ms(partial(step, trained, b), repeats=3, warm=2)
            out[key] = {
                "tok_s": round(b.token_count / t * 1e3),
                "mfu_of_989": round(flops / t / 1e-3 / 989e12, 3),
                "ms": round(t, 1),
                "peak_gib": round(peak_gib(), 1),
                "reserved_gib": round(reserved_gib(), 1),
                "grad_norm": round(step(trained, b)["grad_norm"], 5),
            }
        except torch.OutOfMemoryError as error:
            out[key] = f"out of memory: {str(error)[:300]}"
    del trained, made
    free_all()


def decode(out: Any) -> None:
    """The embedded engine: milliseconds a step, by rows, as CUDA graphs and without, and whether both sample the same,
    also with other weights; the memory that it holds asleep."""
    new = 64 if not RUN.tiny else 4
    m = model()
    before = allocated()
    engines = {}
    for rows in (1, 32, 128, 256) if not RUN.tiny else (2,):
        replies = {}
        for captured in (True, False):
            name = f"{rows} rows{'' if captured else ', no graphs'}"
            engine = None
            engines.pop(captured, None)
            free_all()  # of the memory that is left the engine takes a share
            engine = engines[captured] = engine_of(m, rows, captured=captured)
            t = time.perf_counter()
            play(engine, rows, new)
            first = time.perf_counter() - t
            t = time.perf_counter()
            replies[captured] = play(engine, rows, new)
            t = time.perf_counter() - t
            out[name] = {
                "ms_a_step": round(1e3 * t / new, 1),
                "tok_s": round(rows * new / t),
                "first_s": round(first, 1),
            } | graphs_of(engine)
        out[f"{rows} rows, same tokens"] = same(replies[True], replies[False])
    with torch.no_grad():
        next(p for name, p in m.named_parameters() if name.endswith("model.norm.weight")).neg_()
    for engine in engines.values():
        engine.set_version(1)
    other = {captured: play(engine, rows, new, sleeps=True) for captured, engine in engines.items()}
    out["same tokens after a change of weights"] = same(other[True], other[False])
    out["tokens of the old weights"] = same(other[True], replies[True])
    out["gib_asleep"] = round((allocated() - before) / 2**30, 3)
    assert out["same tokens after a change of weights"] > 0.5 > out["tokens of the old weights"]


def state(out: Any) -> None:
    """Saving and continuing on the GPU: memory of `state_dict`, and a state loaded where it was saved; an optimizer
    that sleeps."""
    trained, b = policy(model()), batch(1, 2, 8, 16)
    step(trained, b)
    before = allocated()
    made = trained.state_dict()
    out["gib_more_on_the_gpu_while_saving"] = (allocated() - before) / 2**30
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        t = time.perf_counter()
        torch.save(made, path)
        out["save"] = {"s": round(time.perf_counter() - t, 1), "gib": round(path.stat().st_size / 2**30, 2)}
        del made
        loaded = torch.load(path, weights_only=True)
    out["loads_to"] = next(iter(loaded["masters"].values())).device.type
    trained.load_state_dict(loaded)
    step(trained, b)
    del loaded
    awake, memory = allocated(), psutil.Process().memory_info
    for turn in ("first", "again"):  # locks the CPU's memory, which stays locked
        t, held = time.perf_counter(), memory().rss
        trained.sleep()
        slept = time.perf_counter() - t
        asleep = allocated()
        t = time.perf_counter()
        trained._trained._sleeping.wake()
        out[f"sleeps, {turn}"] = {
            "sleep_s": round(slept, 2),
            "wake_s": round(time.perf_counter() - t, 2),
            "gib": round((awake - asleep) / 2**30, 2),
            "gib_of_the_cpu": round((memory().rss - held) / 2**30, 2),
        }
    step(trained, b)


def profile(out: Any) -> None:
    """Time of an update, and of steps of decoding: the kernels that take most, and the share of time in which the GPU
    works."""
    if not GPU:
        out["left out"] = "needs a GPU"
        return
    m = model()
    trained, b, engine = policy(m), batch(1, 8, 1024, 1024), engine_of(m, 128)
    works = {"update": partial(step, trained, b, b), "decoding, 128 rows": partial(play, engine, 128, 16)}
    for name, work in works.items():
        work(), work()
        sync()
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as p:
            t = time.perf_counter()
            work()
            sync()
            t = time.perf_counter() - t
        events = p.key_averages()
        kernels = [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]
        kernels.sort(key=lambda e: -e.self_device_time_total)
        busy = sum(e.self_device_time_total for e in kernels) / 1e6
        out[name] = {"seconds": round(t, 3), "gpu_busy": round(busy / t, 3)}
        out[f"{name}: kernels"] = [
            f"{e.self_device_time_total / 1e3:8.1f} ms {e.count:6d} {e.key[:110]}" for e in kernels[:20]
        ]
        operations = sorted((e for e in events if e.device_type.name == "CPU"), key=lambda e: -e.self_device_time_total)
        out[f"{name}: operations"] = [
            f"{e.self_device_time_total / 1e3:8.1f} ms {e.count:6d} {e.key[:60]}" for e in operations[:20]
        ]
        calls = sorted(events, key=lambda e: -e.self_cpu_time_total)
        out[f"{name}: calls"] = [f"{e.self_cpu_time_total / 1e3:8.1f} ms {e.count:6d} {e.key[:50]}" for e in calls[:8]]
