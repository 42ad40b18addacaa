"""Sections of first light that say what is right on a GPU."""

import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from benchmarks.first_light_common import (
    CPU,
    DEV,
    DT,
    GPU,
    RUN,
    allocated,
    batch,
    engine_of,
    graphs_of,
    matmul_flops,
    model,
    ms,
    play,
    policy,
    same,
    step,
    use,
)

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = ("triton", "numpy", "attrs", "safetensors", "tokenizers", "peft", "accelerate", "ray", "deepspeed", "vllm")
KERNELS = ("flash-attn-4", "flash-linear-attention", "causal-conv1d", "mamba-ssm", "kernels", "bitsandbytes")
"""Packages whose kernels models use where they are installed."""
VARIABLES = ("CUDA", "PYTORCH", "TORCH", "NCCL", "CUBLAS", "OMP")
"""Beginnings of the environment variables that change what is measured."""

KINDS = (
    *("llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "mimo_v2_flash", "qwen3_moe", "mixtral", "deepseek_v3"),
    *("gpt2", "lfm2", "qwen3_5_text", "qwen3_next", "granitemoehybrid", "nemotron_h", "jamba", "bloom"),
)
"""Plain heads; caps; windows; sinks, alone and beside values of another width; experts of three kinds; latent
attention; biases; convolutions; the delta rule, alone and with experts; both Mambas, too; computed padded."""


def environment(out: Any) -> None:
    import transformers

    from rollgrad.adapters.system.cores import usable_cores

    out["versions"] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    found = {str(dist.metadata["Name"]).lower().replace("_", "-"): dist.version for dist in distributions()}
    out["packages"] = {name: found.get(name) for name in (*PACKAGES, *KERNELS)}
    out["compilers"] = {name: shutil.which(name) for name in ("gcc", "g++", "nvcc", "ninja")}
    out["threads of the CPU"] = {"torch": torch.get_num_threads(), "cores": os.cpu_count(), "usable": usable_cores()}
    out["x[i] of 16384 numbers on the CPU, us, by threads"] = _indexing_us()
    out["variables"] = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    if GPU:
        from rollgrad.adapters.models.torch.kernels.attention import widest_head

        p = torch.cuda.get_device_properties(0)
        out["gpu"] = {
            "name": p.name,
            "capability": torch.cuda.get_device_capability(0),
            "gib": round(p.total_memory / 2**30, 1),
            "free_gib": round(torch.cuda.mem_get_info(0)[0] / 2**30, 1),
            "nccl": str(torch.cuda.nccl.version()),
            "widest head of FlashAttention": widest_head(DEV),
        }
        x = torch.randn(2**30, device=DEV)
        y = torch.empty_like(x)
        out["copy_tb_s"] = round(2 * x.nbytes / ms(lambda: y.copy_(x)) / 1e9, 2)
    out["matmul_tflops"] = round(matmul_flops() / 1e12, 1)


def _indexing_us() -> dict[int, float]:
    """Microseconds of indexing by torch's own number of threads, and by one."""
    threads, x, places = torch.get_num_threads(), torch.randn(16384), torch.arange(16384)
    found = {}
    try:
        for count in (threads, 1):
            torch.set_num_threads(count)
            found[count] = round(1e3 * ms(lambda: x[places], repeats=20, warm=5), 1)
    finally:
        torch.set_num_threads(threads)
    return found


def gpu_equals_cpu(out: Any) -> None:
    """Log-probs and steps in float32 on the GPU against the CPU, small shape: placement, sharing, masters."""
    RUN.tiny = True
    b, found = batch(2, 3, 9, 14), {}
    for device in {"cpu", DEV.type}:
        m = model(torch.float32, torch.device(device))
        m.load_state_dict(model(torch.float32, CPU).state_dict())
        trained = policy(m, lr=1e-3)
        before = trained.score(b).logprobs_N
        metrics = [step(trained, b) for _ in range(2)][-1]
        found[device] = (before, trained.score(b).logprobs_N, metrics["grad_norm"])
    (a0, a1, an), (c0, c1, cn) = found["cpu"], found[DEV.type]
    out["before"], out["after"] = (a0 - c0).abs().max().item(), (a1 - c1).abs().max().item()
    out["norms"] = (an, cn)
    assert out["before"] < 1e-3
    assert out["after"] < 1e-2


def attention_is_right(out: Any) -> None:
    """Forest nodes, grouped heads, windows, sinks, caps and heads of several widths: forward and backward against
    float32 with explicit masks; and the kernel of a decoding step."""
    widths = ((64, 64), (128, 128), (256, 256), (192, 128), (20, 12), (512, 512))
    ways = [("varlen", DT), ("varlen", torch.float16), ("buckets", DT), ("buckets", torch.float32)]
    if RUN.tiny or not GPU:
        widths, ways = widths[:1], ways[2:]
    wrong: dict[str, str] = {}
    for (width, value_width), (kind, dtype) in itertools.product(widths, ways):
        name, allowed = f"{kind}, {str(dtype)[6:]}, {width}/{value_width}", 1e-3 if dtype == torch.float32 else 0.02
        errors: dict[str, Any] = {}
        for window, form in itertools.product((None, 16), ("plain", "sinks", "cap")):
            try:
                errors[f"{form}, {window}"] = _error(kind, dtype, width, value_width, window, form)
            except Exception:
                traceback.print_exc()
                errors[f"{form}, {window}"] = traceback.format_exc()[-600:]
        for case, error in errors.items():
            if not (isinstance(error, float) and error < allowed):
                wrong[f"{name}; {case}"] = str(error)
        out[name] = max((e for e in errors.values() if isinstance(e, float)), default=None)
    for dtype in (DT, torch.float32):
        error = out[f"a step's kernel, {str(dtype)[6:]}"] = _decoding_error(dtype)
        if not error < (1e-3 if dtype == torch.float32 else 0.02):
            wrong[f"a step's kernel, {dtype}"] = str(error)
    out["wrong"] = wrong
    assert not wrong


def _error(kind: str, dtype: torch.dtype, width: int, value_width: int, window: int | None, form: str) -> float:
    """Largest relative error of attention's result and its gradients.

    Args:
        kind: way of attention, as `use` takes it.
        dtype: number format of attention; what it is compared with is float32.
        width: of a head's queries and keys.
        value_width: of a head's values.
        window: tokens that a query sees; None: all before it.
        form: `plain`, `sinks` or `cap`.
    """
    from rollgrad.adapters.models.torch.kernels.score_form import ScoreForm
    from rollgrad.adapters.models.torch.layers.attention import ForestAttention
    from rollgrad.adapters.models.torch.layers.layout import Node

    nodes = [
        Node(0, 37),
        Node(37, 50, ((0, 37),)),
        Node(87, 1, ((0, 37),)),
        Node(88, 200, ((0, 37), (37, 25))),
        Node(288, 129),
    ]
    total, hq, hk = 417, 8, 2
    torch.manual_seed(0)
    shapes = ((hq, width), (hk, width), (hk, value_width), (hq, value_width))
    q, k, v, g = (torch.randn(1, h, total, w, device=DEV) for h, w in shapes)
    sinks, g = torch.randn(hq, device=DEV), g.transpose(1, 2)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    q_leaf, k_leaf, v_leaf, sinks_leaf = leaves
    expected = _expected(q_leaf, k_leaf, v_leaf, sinks_leaf, _visible(nodes, total, window), form)
    expected.backward(g)
    use(kind)
    ours = [t.to(dtype).requires_grad_() for t in (q, k, v, sinks)]
    plan = ForestAttention(nodes, device=DEV, dtype=dtype)
    sinks_H, cap = ours[3] if form == "sinks" else None, 2.0 if form == "cap" else None
    form_of_layer = ScoreForm(width**-0.5, window, sinks_H=sinks_H, cap=cap)
    found = plan.attend(0, ours[0], ours[1], ours[2], form_of_layer)
    found.backward(g.to(dtype))
    count = 4 if form == "sinks" else 3
    pairs = [
        (found.detach(), expected.detach()),
        *((a.grad, b.grad) for a, b in zip(ours[:count], leaves[:count], strict=True)),
    ]
    return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)


def _visible(nodes: Sequence[Any], total: int, window: int | None) -> torch.Tensor:
    """Whether each token of a forest sees each other one, [total, total]."""
    visible = torch.zeros(total, total, dtype=torch.bool, device=DEV)
    position = torch.zeros(total, dtype=torch.long, device=DEV)
    for n in nodes:
        own = torch.arange(n.length, device=DEV)
        position[n.start : n.start + n.length] = n.prefix_length + own
        visible[n.start : n.start + n.length, n.path()[: n.prefix_length]] = True
        visible[n.start : n.start + n.length, n.start : n.start + n.length] = own[None] <= own[:, None]
    return visible if window is None else visible & (position[None] > position[:, None] - window)


def _expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, visible: torch.Tensor, form: str
) -> torch.Tensor:
    """Attention by its formula [1, T, H, E], of queries and keys [1, H, T, D] and values [1, H, T, E]."""
    hq, total, width = q.shape[1:]
    kk, vv = (t.repeat_interleave(hq // k.shape[1], 1) for t in (k, v))
    scores = q @ kk.transpose(-1, -2) * width**-0.5
    scores = (2 * torch.tanh(scores / 2) if form == "cap" else scores).masked_fill(~visible, -torch.inf)
    sink = (sinks if form == "sinks" else torch.full_like(sinks, -torch.inf)).view(1, hq, 1, 1)
    weights = torch.cat([scores, sink.expand(1, hq, total, 1)], -1).softmax(-1)[..., :-1]
    return (weights @ vv).transpose(1, 2)


def _decoding_error(dtype: torch.dtype) -> float:
    """Largest relative error of the kernel that attends to blocks, and of its sums."""
    from rollgrad.adapters.models.torch.kernels.attention import dense_with_logsumexp

    torch.manual_seed(0)
    q, k, v = (torch.randn(5, 2, n, 64, device=DEV).to(dtype) for n in (4, 128, 128))
    mask = torch.zeros(5, 1, 1, 128, device=DEV, dtype=dtype)
    mask[1, ..., 100:] = -torch.inf
    scores = q.double() @ k.double().transpose(2, 3) * 0.3 + mask.double()
    with torch.inference_mode():
        found, sums = dense_with_logsumexp(q, k, v, mask=mask, scaling=0.3)
    pairs = [(found, scores.softmax(-1) @ v.double()), (sums, scores.logsumexp(-1))]
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def architectures(out: Any) -> None:
    """Tiny models of many kinds: log-probs in float32 as the CPU's; and in bfloat16 they are packed, sampled from and
    trained."""
    if GPU:
        torch.backends.cuda.enable_cudnn_sdp(False)  # as loading a model does
    failed = []
    for kind in KINDS[:3] if RUN.tiny else KINDS:
        try:
            out[kind] = _computed(kind)
        except Exception as error:
            traceback.print_exc()
            out[kind] = {"FAILED": f"{type(error).__name__}: {error}"[:500], "at": traceback.format_exc()[-1500:]}
            failed.append(kind)
    assert not failed, failed


def _computed(kind: str) -> dict[str, Any]:
    from structlog.testing import capture_logs

    from rollgrad.adapters.engines.embedded.decoding import check_decoding
    from rollgrad.adapters.models.torch.layers.padded import is_padded
    from rollgrad.adapters.models.torch.loading.compatibility import install_and_compare
    from rollgrad.adapters.models.torch.references import TorchReference

    b, scores, found = batch(2, 3, 9, 14, vocabulary=100), [], dict[str, Any]()
    with capture_logs() as logs:
        for device in (CPU, DEV):
            made = tiny(kind).to(device)
            install_and_compare(made)
            scores.append(TorchReference(made).score(b).logprobs_N)
        found["differs"] = round((scores[0] - scores[1]).abs().max().item(), 6)
        assert found["differs"] < 1e-2, found
        made = tiny(kind).to(DEV, DT)
        install_and_compare(made)
        found["padded"] = is_padded(made)
        check_decoding(made, "it")
        found["norm"] = round(step(policy(made, lr=1e-3), b)["grad_norm"], 4)
    said = {log["event"] for log in logs}
    return found | ({"said": sorted(said)} if said else {})


def graphs(out: Any) -> None:
    """Decoding steps as CUDA graphs: of a mixture, whose steps the engine takes one by one; and after a capture that
    has failed, of a function that waits for the GPU."""
    if not GPU:
        out["left out"] = "needs a GPU"
        return
    from rollgrad.adapters.engines.embedded.step_graphs import CudaCapture, StepGraphs
    from rollgrad.adapters.models.torch.loading.compatibility import install_and_compare

    for kind, dtype in itertools.product(("qwen3_moe", "gpt_oss"), (DT, torch.float32)):
        made = tiny(kind).to(DEV, dtype)
        install_and_compare(made)
        replies = {}
        for captured in (True, False):
            engine = engine_of(made, 4)
            engine._batch.decoder._graphs = StepGraphs(made, DEV, CudaCapture()) if captured else None
            replies[captured] = play(engine, 4, 8, vocabulary=100)
            if captured:
                out[f"{kind}, {str(dtype)[6:]}"] = graphs_of(engine)
        out[f"{kind}, {str(dtype)[6:]}: same tokens"] = same(replies[True], replies[False])
    capture: Any = CudaCapture()
    x = torch.ones(8, device=DEV)
    try:
        capture(lambda given: given * float(given.sum()), x)
    except RuntimeError as error:
        out["a capture that fails"] = str(error)[:200]
    torch.cuda.empty_cache()
    out["memory after it"] = allocated()
    out["random numbers after it"] = float(torch.randn(2**20, device=DEV).std())
    result, replay = capture(lambda given: given * 2, x)
    x.fill_(3)
    replay()
    out["a capture after it"] = result.tolist()
    assert out["a capture after it"] == [6.0] * 8
    assert "a capture that fails" in out


def tiny(kind: str) -> Any:
    """A model with random weights, as the tests have them."""
    spec = importlib.util.spec_from_file_location("tiny_architectures", ROOT / "tests" / "tiny_architectures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.tiny_model(kind)


def gpu_tests(out: Any) -> None:
    """The unit tests marked `gpu`."""
    lacking = [
        name for name in ("pytest", "pytest_asyncio", "hypothesis", "psutil") if not importlib.util.find_spec(name)
    ]
    if not GPU or lacking:
        out["left out"] = f"needs {', '.join(lacking) or 'a GPU'}"
        return
    files = [str(f) for f in sorted(ROOT.glob("tests/unit/**/test_*.py")) if "mark.gpu" in f.read_text("utf-8")]
    if not importlib.util.find_spec("bitsandbytes"):
        files = [name for name in files if not name.endswith("quantized.py")]
    words = ["-m", "pytest", "-q", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider", "-n", "0", *files]
    ended = subprocess.run(
        [sys.executable, *words], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said = ended.stdout.decode(errors="replace")
    print(said[-8000:], flush=True)
    out["end"] = said[-3000:]
    assert not ended.returncode
