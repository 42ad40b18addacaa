"""First light on one GPU: what is right, and what is fast, in one call of under ten minutes.

    python3 benchmarks/first_light.py [--smoke] [--only NAME,NAME] [--out DIR] [--seconds SECONDS]

Each section runs in a process of its own, which is killed when its time or that of all is over, so that none spoils or
holds up the next; those whose answers matter most come first. What a section finds is printed at once, and with --out
written to OUT/first_light.json; at the end comes a table. `--smoke` is the same code on small shapes, for machines
without a GPU too. Model: random weights in the shape of Qwen3-0.6B, so nothing has to be downloaded. `ipc` unpacks by
vLLM's own file, of the installed vLLM or --vllm-packed; `deepspeed` needs that library. For a machine
without a network `scripts/offline.py` gathers what it lacks.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve


def installed_packing() -> str:
    """The file of the installed vLLM that unpacks weights, found without importing it; empty without vLLM."""
    found = importlib.util.find_spec("vllm")
    return "" if found is None else str(Path(str(found.origin)).parent / "distributed/weight_transfer/packed_tensor.py")


ARGS = argparse.ArgumentParser()
ARGS.add_argument("--smoke", "--tiny", dest="tiny", action="store_true")
ARGS.add_argument("--only", default="", help="sections, by commas")
ARGS.add_argument("--out", default=os.environ.get("OUT", ""), help="folder of the results")
ARGS.add_argument("--seconds", type=float, default=570, help="of all sections together, at most")
ARGS.add_argument("--section", default="", help="the one to run in this process; --out is then its file")
ARGS.add_argument("--vllm-packed", default=installed_packing(), help="another packed_tensor.py than the installed one")
A = ARGS.parse_args() if __name__ == "__main__" else ARGS.parse_args([])
GPU = torch.cuda.is_available()
DEV = torch.device("cuda", 0) if GPU else torch.device("cpu")
DT = torch.bfloat16


class Found(dict):
    """Findings of a section, which are kept as soon as they are there: it may be killed before its end."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        print(f"   {name}: {json.dumps(value, default=str)}", flush=True)
        if A.section:
            Path(A.out).write_text(json.dumps(self, default=str))


def sync() -> None:
    if GPU:
        torch.cuda.synchronize()


def ms(work, *, repeats: int = 5, warm: int = 2) -> float:
    for _ in range(warm):
        work()
    times = []
    for _ in range(repeats):
        sync()
        t = time.perf_counter()
        work()
        sync()
        times.append(time.perf_counter() - t)
    return 1e3 * sorted(times)[len(times) // 2]


def gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0


def matmul_flops() -> float:
    """FLOPs a second of a product of large matrices."""
    size = 256 if A.tiny else 8192
    a, b = (torch.randn(size, size, device=DEV, dtype=DT) for _ in range(2))
    return 2 * size**3 / ms(lambda: a @ b) * 1e3


def use(kind: str) -> None:
    """Has attention computed by the variable-length kernel, where there is one, or in padded buckets."""
    from rollgrad.adapters.models.torch import attention, kernels

    attention.has_varlen = {"varlen": kernels.has_varlen, "buckets": lambda *_: False}[kind]  # type: ignore[attr-defined]


# ---------------------------------------------------------------- shapes
def config():
    from transformers import Qwen3Config

    if A.tiny:
        return Qwen3Config(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=512,
            tie_word_embeddings=True,
        )
    return Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
    )


def model(dtype=DT, device=DEV):
    from transformers import AutoModelForCausalLM

    from rollgrad.adapters.models.torch.attention import install_attention

    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config(), dtype=dtype).eval()
    install_attention(made)
    return made


def batch(groups: int, samples: int, prompt: int, reply: int):
    from rollgrad.domain.batches.packed import pack
    from rollgrad.domain.episodes.generation import Generation, StopReason
    from rollgrad.domain.episodes.trajectory import TrajectoryBuilder

    g = torch.Generator().manual_seed(1)
    made = []
    for group in range(groups):
        ids = torch.randint(0, 500, (prompt,), generator=g).tolist()
        for sample in range(samples):
            builder = TrajectoryBuilder(ids, group_id=group, sample_id=group * samples + sample)
            tokens = torch.randint(0, 500, (reply,), generator=g).tolist()
            builder.add_action(
                Generation(
                    token_ids=tokens, logprobs=[-1.0] * reply, versions=[0] * reply, stop_reason=StopReason.LENGTH
                )
            )
            made.append(builder.build(stop_reason=StopReason.LENGTH))
    packed = pack(made)
    weights = packed.action_mask_N / packed.action_mask_N.sum()
    return evolve(packed, advantages_N=torch.randn(packed.token_count, generator=g), loss_weights_N=weights)


# ---------------------------------------------------------------- sections
def environment(out):
    import transformers

    out["versions"] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    if GPU:
        p = torch.cuda.get_device_properties(0)
        out["gpu"] = {"name": p.name, "gib": round(p.total_memory / 2**30, 1), "nccl": str(torch.cuda.nccl.version())}
        x = torch.randn(2**30, device=DEV)
        y = torch.empty_like(x)
        out["copy_tb_s"] = round(2 * x.nbytes / ms(lambda: y.copy_(x)) / 1e9, 2)
    out["matmul_tflops"] = round(matmul_flops() / 1e12, 1)


def attention_is_right(out):
    """Forest nodes, grouped heads, windows: forward and backward against float32 with explicit masks."""
    from rollgrad.adapters.models.torch.attention import ForestAttention
    from rollgrad.adapters.models.torch.layout import Node

    nodes = [
        Node(0, 37),
        Node(37, 50, ((0, 37),)),
        Node(87, 1, ((0, 37),)),
        Node(88, 200, ((0, 37), (37, 25))),
        Node(288, 129),
    ]
    total, hq, hk, d = 417, 8, 2, 64
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, h, total, d, device=DEV) for h in (hq, hk, hk, hq))
    g = g.transpose(1, 2)
    visible = torch.zeros(total, total, dtype=torch.bool, device=DEV)
    position = torch.zeros(total, dtype=torch.long, device=DEV)
    for n in nodes:
        own = torch.arange(n.length, device=DEV)
        position[n.start : n.start + n.length] = n.prefix_length + own
        visible[n.start : n.start + n.length, n.path()[: n.prefix_length]] = True
        visible[n.start : n.start + n.length, n.start : n.start + n.length] = own[None] <= own[:, None]
    for window in (None, 16):
        mask = visible.clone()
        if window is not None:
            mask &= position[None] > position[:, None] - window
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        kk, vv = (t.repeat_interleave(hq // hk, 1) for t in leaves[1:])
        scores = (leaves[0] @ kk.transpose(-1, -2) * d**-0.5).masked_fill(~mask, -torch.inf)
        ref = (scores.softmax(-1) @ vv).transpose(1, 2)
        ref.backward(g)
        for kind in ("varlen", "buckets") if GPU else ("buckets",):
            use(kind)
            ours = [t.to(DT).requires_grad_() for t in (q, k, v)]
            plan = ForestAttention(nodes, device=DEV, dtype=DT)
            got = plan.attend(0, ours[0], ours[1], ours[2], d**-0.5, window)
            got.backward(g.to(DT))
            error = [
                ((a.float() - b).norm() / b.norm()).item()
                for a, b in ((got, ref), *((x.grad, y.grad) for x, y in zip(ours, leaves, strict=True)))
            ]
            out[f"{kind}, window {window}"] = [round(e, 5) for e in error]
            assert max(error) < 0.02, (kind, window, error)


def attention_is_fast(out):
    """One layer's attention of a group: 8 replies of 2048 behind a prompt of 1024, Qwen3's heads, in ms."""
    from rollgrad.adapters.models.torch.attention import ForestAttention
    from rollgrad.adapters.models.torch.layout import Node

    n, p, r = (8, 1024, 2048) if not A.tiny else (2, 16, 32)
    nodes = [Node(0, p), *(Node(p + i * r, r, ((0, p),)) for i in range(n))]
    total = p + n * r
    q, k, v = (torch.randn(1, h, total, 128, device=DEV, dtype=DT, requires_grad=True) for h in (16, 8, 8))
    g = torch.randn(1, total, 16, 128, device=DEV, dtype=DT)
    pairs = p * p / 2 + n * (r * p + r * r / 2)
    flops = 3.5 * 4 * pairs * 16 * 128
    for name in ("varlen", "buckets") if GPU else ("buckets",):
        use(name)
        plan = ForestAttention(nodes, device=DEV, dtype=DT)

        def work(plan=plan):
            for t in (q, k, v):
                t.grad = None
            plan.attend(0, q, k, v, 128**-0.5, None).backward(g)

        try:
            if GPU:
                torch.cuda.reset_peak_memory_stats()
            t0 = time.perf_counter()
            work()
            sync()
            first = time.perf_counter() - t0
            t = ms(work)
            out[name] = {
                "ms": round(t, 2),
                "first_ms": round(1e3 * first, 1),
                "tflops": round(flops / t / 1e9, 1),
                "peak_gib": round(gib(), 2),
            }
        except torch.OutOfMemoryError as error:
            out[name] = f"out of memory: {str(error)[:80]}"


def head(out):
    """token_logprobs forward + backward by chunk size; floor: 8 x V x H x A FLOPs."""
    from rollgrad.adapters.models.torch import chunked_logprobs as module

    a, h, v = (16384, 1024, 151936) if not A.tiny else (64, 32, 512)
    x = torch.randn(a, h, device=DEV, dtype=DT, requires_grad=True)
    w = (torch.randn(v, h, device=DEV) * 0.02).to(DT).requires_grad_()
    t = torch.randint(0, v, (a,), device=DEV)
    out["floor_ms"] = round(1e3 * 8 * a * h * v / matmul_flops(), 1)
    own = module.chunk_bytes(DEV)
    out["own_mib"] = own / 2**20
    for size in (64 * 2**20, 256 * 2**20, 1024 * 2**20, own):
        module.chunk_bytes = lambda device, size=size: size

        def work():
            x.grad = w.grad = None
            logprobs, entropy = module.token_logprobs(x, w, None, t, 1.0)
            (logprobs.sum() + 0.0 * entropy.sum()).backward()

        if GPU:
            torch.cuda.reset_peak_memory_stats()
        out[f"{size / 2**20:.0f} MiB"] = {"ms": round(ms(work, repeats=3, warm=1), 1), "peak_gib": round(gib(), 2)}


def update(out):
    """Whole optimizer steps of one process: tokens a second, share of an H100's 989 TFLOP/s, memory."""
    from rollgrad.adapters.models.torch.compiling import compile_layers
    from rollgrad.adapters.models.torch.layout import build_layout
    from rollgrad.adapters.models.torch.models import TorchPolicy
    from rollgrad.adapters.models.torch.optimizer import OptimizerSettings
    from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective

    cases = {
        "1 x 16384": (1, 1, 16, 16368),
        "8 x 2048, prompt 1024 shared": (1, 8, 1024, 2048),
    }
    if A.tiny:
        cases = {"tiny": (1, 2, 8, 16)}
    for way in ("kept", "checkpointed") if A.tiny else ("kept", "checkpointed", "compiled"):  # in a minute on a CPU
        made = model()
        if way == "compiled":
            compile_layers(made)
        policy = TorchPolicy(made, None, OptimizerSettings(lr=1e-6), gradient_checkpointing=way == "checkpointed")
        body = sum(p.numel() for p in made.base_model.parameters()) - made.get_input_embeddings().weight.numel()
        weight = made.get_output_embeddings().weight.numel()
        for name, shape in cases.items():
            b = batch(*shape)
            layout = build_layout(b)
            c = made.config
            pairs = sum(n.length * n.prefix_length + n.length**2 / 2 for n in layout.nodes)
            attn = 3 * 4 * pairs * c.num_attention_heads * c.head_dim * c.num_hidden_layers
            flops = 6 * (body * len(layout.tokens_M) + weight * int(b.action_mask_N.sum())) + attn
            if GPU:
                torch.cuda.reset_peak_memory_stats()
            key = f"{name}; {way}"
            try:
                t = ms(lambda policy=policy, b=b: policy.update([b], PolicyLossObjective()), repeats=3, warm=2)
                out[key] = {
                    "tok_s": round(b.token_count / t * 1e3),
                    "mfu_of_989": round(flops / t / 1e-3 / 989e12, 3),
                    "ms": round(t, 1),
                    "peak_gib": round(gib(), 1),
                }
            except torch.OutOfMemoryError:
                out[key] = "out of memory"
        del policy, made
        if GPU:
            torch.cuda.empty_cache()


def gpu_equals_cpu(out):
    """Log-probs and one step in float32 on the GPU against the CPU, small shape: placement, sharing, masters."""
    from rollgrad.adapters.models.torch.models import TorchPolicy
    from rollgrad.adapters.models.torch.optimizer import OptimizerSettings
    from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective

    A.tiny = True
    b, found = batch(2, 3, 9, 14), {}
    for device in {"cpu", DEV.type}:
        m = model(torch.float32, torch.device(device))
        reference = model(torch.float32, torch.device("cpu")).state_dict()
        m.load_state_dict(reference)
        policy = TorchPolicy(m, None, OptimizerSettings(lr=1e-3))
        before = policy.score(b).logprobs_N
        for _ in range(2):
            metrics = policy.update([b], PolicyLossObjective(entropy_coef=0.01))
        found[device] = (before, policy.score(b).logprobs_N, metrics["grad_norm"])
    (a0, a1, an), (c0, c1, cn) = found["cpu"], found[DEV.type]
    out["before"], out["after"] = (a0 - c0).abs().max().item(), (a1 - c1).abs().max().item()
    out["norms"] = (an, cn)
    assert out["before"] < 1e-3
    assert out["after"] < 1e-2


def decode(out):
    """The embedded engine: milliseconds a step, by rows, as CUDA graphs and without."""
    from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
    from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams

    new = 64 if not A.tiny else 4
    m = model()
    sizes = (1, 32, 128, 256) if not A.tiny else (2,)
    for rows, captured in [(rows, captured) for rows in sizes for captured in (True, False)]:
        engine = EmbeddedEngine(m, eos_token_ids=[], max_batch_size=rows)
        if not captured:
            engine._decoder._graphs = None
        asked = [
            GenerationRequest(
                prompt_token_ids=tuple(range(5, 69)), params=SamplingParams(max_new_tokens=new, seed=seed)
            )
            for seed in range(rows)
        ]

        async def play(engine=engine, asked=asked):
            return await asyncio.gather(*(engine.generate(r) for r in asked))

        asyncio.run(play())
        t = time.perf_counter()
        asyncio.run(play())
        t = time.perf_counter() - t
        out[f"{rows} rows{'' if captured else ', no graphs'}"] = {
            "ms_a_step": round(1e3 * t / new, 1),
            "tok_s": round(rows * new / t),
        }


def state(out):
    """Saving and continuing on the GPU: memory of `state_dict`, and a state loaded where it was saved."""
    from rollgrad.adapters.models.torch.models import TorchPolicy
    from rollgrad.adapters.models.torch.optimizer import OptimizerSettings
    from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective

    policy = TorchPolicy(model(), None, OptimizerSettings(lr=1e-6))
    policy.update([batch(1, 2, 8, 16)], PolicyLossObjective())
    before = torch.cuda.memory_allocated() if GPU else 0
    made = policy.state_dict()
    out["gib_more_on_the_gpu_while_saving"] = ((torch.cuda.memory_allocated() if GPU else 0) - before) / 2**30
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        t = time.perf_counter()
        torch.save(made, path)
        out["save"] = {"s": round(time.perf_counter() - t, 1), "gib": round(path.stat().st_size / 2**30, 2)}
        del made
        loaded = torch.load(path, weights_only=True)
    out["loads_to"] = next(iter(loaded["masters"].values())).device.type
    policy.load_state_dict(loaded)
    policy.update([batch(1, 2, 8, 16)], PolicyLossObjective())


def divided(out, start, ways):
    """One process of a group over NCCL: the same step as without one, its time, and that of gathering weights."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from rollgrad.adapters.models.torch.models import TorchPolicy
    from rollgrad.adapters.models.torch.optimizer import OptimizerSettings
    from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start(rank=0, size=1, host="127.0.0.1", port=store.port, local_rank=0, timeout=60)
    b = batch(1, 8, 1024, 1024) if not A.tiny else batch(1, 2, 8, 16)
    settings, alone = OptimizerSettings(lr=1e-4, total_steps=10), None
    for name, optimize in {"one process": None, **ways}.items():
        policy = TorchPolicy(model(), None, settings, **({} if optimize is None else {"optimize": optimize}))
        policy.update([b], PolicyLossObjective())
        scores = policy.score(b).logprobs_N
        alone = scores if alone is None else alone
        t = ms(lambda policy=policy: policy.update([b], PolicyLossObjective()), repeats=2, warm=0)
        t0 = time.perf_counter()
        size = sum(w.nbytes for _, w in policy.weights())
        sync()
        differs = (scores - alone).abs().mean().item()
        out[name] = {
            "ms": round(t, 1),
            "gather_s": round(time.perf_counter() - t0, 2),
            "gib": round(size / 2**30, 2),
            "differs": round(differs, 5),
        }
        assert differs < 0.02, name
        del policy
    torch.distributed.destroy_process_group()


def fsdp2(out):
    """FSDP2 of torch, in a group of one process."""
    from rollgrad.adapters.models.fsdp.division import start_process_group
    from rollgrad.adapters.models.fsdp.module import FSDPTrainedModule

    ways = {"fsdp2": FSDPTrainedModule, "fsdp2, offloaded": partial(FSDPTrainedModule, offload=True)}
    divided(out, start_process_group, ways)


def deepspeed(out):
    """DeepSpeed's ZeRO 2 and 3, in a group of one process."""
    from rollgrad.adapters.models.deepspeed.module import DeepSpeedModule
    from rollgrad.adapters.models.deepspeed.processes import start_process_group
    from rollgrad.adapters.models.deepspeed.settings import DeepSpeedSettings

    settings = {"zero 2": DeepSpeedSettings(zero_stage=2), "zero 3": DeepSpeedSettings(zero_stage=3)}
    if GPU:  # compiles an optimizer
        settings["zero 2, offloaded"] = DeepSpeedSettings(zero_stage=2, adam_offload=True)
    divided(out, start_process_group, {name: partial(DeepSpeedModule, division=d) for name, d in settings.items()})


def ipc(out):
    """Weights to another process on this GPU by handle, unpacked by vLLM's own file."""
    if not GPU or not A.vllm_packed:
        out["left out"] = "needs a GPU, and vLLM or --vllm-packed"
        return
    import torch.multiprocessing as mp

    mp.set_start_method("spawn", force=True)
    from rollgrad.adapters.weights.cuda_ipc import exported

    weights = list(model().state_dict().items())[:-1]  # the head is the embedding
    to, back = mp.Queue(), mp.Queue()
    child = mp.Process(target=_consume, args=(A.vllm_packed, to, back))
    child.start()
    back.get(timeout=60)
    rounds = []
    for _ in range(3):
        t, size = time.perf_counter(), 0
        for contents, handles in exported(iter(weights)):
            to.put((contents.names, contents.dtype_names, contents.shapes, contents.tensor_sizes, handles))
            sums = back.get(timeout=60)
            size += sum(contents.tensor_sizes)
        rounds.append(time.perf_counter() - t)
    named = dict(weights)
    assert all(abs(named[n].double().sum().item() - s) <= 1e-6 * max(1, abs(s)) for n, s in sums.items()), "wrong bytes"
    to.put(None)
    child.join(30)
    out["seconds"] = [round(r, 3) for r in rounds]
    out["gib"], out["gb_s"] = round(size / 2**30, 2), round(size / min(rounds) / 1e9, 1)


def _consume(path, to, back):
    spec = importlib.util.spec_from_file_location("packed_tensor", path)
    assert spec is not None
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


def profile(out):
    """Time of one update: the ten kernels that take most, and the share of time in which the GPU idles."""
    if not GPU:
        out["left out"] = "needs a GPU"
        return
    from rollgrad.adapters.models.torch.models import TorchPolicy
    from rollgrad.adapters.models.torch.optimizer import OptimizerSettings
    from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective

    policy, b = TorchPolicy(model(), None, OptimizerSettings(lr=1e-6)), batch(1, 8, 1024, 1024)
    step = lambda: policy.update([b, b], PolicyLossObjective())  # noqa: E731
    step(), step()
    sync()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as p:
        t = time.perf_counter()
        step()
        sync()
        t = time.perf_counter() - t
    kernels = [e for e in p.key_averages() if e.device_type.name == "CUDA" and not e.is_user_annotation]
    out["seconds"] = round(t, 3)
    out["gpu_busy"] = round(sum(e.self_device_time_total for e in kernels) / 1e6 / t, 3)
    kernels.sort(key=lambda e: -e.self_device_time_total)
    out["top"] = [f"{e.self_device_time_total / 1e3:8.1f} ms {e.count:6d} {e.key[:70]}" for e in kernels[:12]]


SECTIONS = {
    environment: 60,
    gpu_equals_cpu: 60,
    attention_is_right: 60,
    update: 180,
    head: 60,
    decode: 90,
    attention_is_fast: 60,
    profile: 60,
    state: 90,
    ipc: 90,
    fsdp2: 60,
    deepspeed: 150,
}
"""Seconds of each on a GPU at most, its imports and what it compiles included."""


def run_section(section) -> bool:
    """Runs one in this process; returns whether it failed."""
    out = Found()
    try:
        section(out)
    except BaseException as error:
        traceback.print_exc()
        out["FAILED"] = f"{type(error).__name__}: {error}"[:300]
        return True
    return False


def in_a_process(name: str, seconds: float) -> dict:
    """Returns what a section finds in a process of its own, which is killed after so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        words = [*sys.argv[1:], "--section", name, "--out", str(file)]
        child = subprocess.Popen([sys.executable, __file__, *words], start_new_session=True)
        try:
            status: Any = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = f"stopped after {seconds:.0f} s"
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # processes that it has started, too
        child.wait()
        found = json.loads(file.read_text()) if file.exists() else {}
    return found if status == 0 or "FAILED" in found else {**found, "FAILED": status}


def main() -> None:
    if A.section:
        sys.exit(run_section(globals()[A.section]))
    wanted = {n for n in A.only.split(",") if n}
    results: dict[str, dict] = {}
    began = time.perf_counter()
    for section, seconds in SECTIONS.items():
        name = section.__name__
        if wanted and name not in wanted:
            continue
        t = time.perf_counter()
        left = min(A.seconds if A.tiny else seconds, A.seconds - (t - began))
        results[name] = in_a_process(name, left) if left > 0 else {"FAILED": "no time was left for it"}
        results[name]["seconds of it"] = round(time.perf_counter() - t, 1)
        print(f"== {name} ({time.perf_counter() - t:.0f} s): {json.dumps(results[name])}", flush=True)
        if A.out:
            Path(A.out, "first_light.json").write_text(json.dumps(results, indent=1))
    failed = [name for name, found in results.items() if "FAILED" in found]
    print("\n".join(f"{name:20} {'FAILED' if name in failed else 'ok'}" for name in results))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
