"""Every recipe, loss, correction and shaping runs from the command line, and does what it says."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor
from transformers import BatchEncoding

import rollgrad
from rollgrad.adapters.tracking.trajectory_files import read_trajectories
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.settings.presets import PRESETS
from rollgrad.domain.algorithms import catalogue
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.config_io import structure_config
from tests.example_runs import logged
from tests.fakes.teacher_server import TeacherServer
from tests.moved_models import moved_copy

pytestmark = pytest.mark.usefixtures("algorithms_as_before")

REWARD = """
def reward_func(queries, prompts, labels):
    replies = [q[len(p):] for q, p in zip(queries, prompts, strict=True)]
    letters = [sum(c.isalpha() for c in r) / (1 + len(r)) for r in replies]
    return {"rewards": {"letters": letters, "short": [1 / (1 + len(r)) for r in replies]}, "scores": letters}
"""
PLUGIN = """
import torch
from attrs import define

import rollgrad
from rollgrad.domain.algorithms.catalogue import EstimatorTraits
from rollgrad.domain.algorithms.estimators import Advantages
from rollgrad.domain.algorithms.losses.contract import PolicyLoss


@rollgrad.estimator("mine", EstimatorTraits(whiten="batch"))
def mine(inputs, params):
    rewards_N = torch.where(inputs.action_mask_N, inputs.rewards_N, 0.0)
    return Advantages(advantages_N=rewards_N, returns_N=rewards_N)


@rollgrad.kl_estimator("constant")
def constant(logprobs_N, ref_logprobs_N, ratio_N):
    return torch.full_like(logprobs_N, 2.0) + 0 * logprobs_N


@define(kw_only=True)
class MineToo:
    "What scales the loss."

    scale: float = rollgrad.setting(1.0, "Factor of the loss.")


@rollgrad.policy_loss("mine_too", settings=MineToo)
def mine_too(inputs, params, settings):
    never_N = torch.zeros_like(inputs.action_mask_N)
    ratio_N = (inputs.logprobs_N - inputs.old_logprobs_N).exp()
    return PolicyLoss(
        loss_N=-settings.scale * ratio_N * inputs.advantages_N,
        ratio_N=ratio_N,
        clipped_low_N=never_N,
        clipped_high_N=never_N,
        metrics_N={"scaled_ratio": settings.scale * ratio_N},
    )
"""
ASKS = """
async def on_step(step, metrics, groups, run):
    prompts = ["Say it", [{"role": "user", "content": "Say it"}], groups[0].prompt]
    replies = await run.generate(prompts, temperature=0, max_new_tokens=3)
    await run.evaluate()
    return {"mine/replies": len(replies), "mine/same": float(replies[0] == replies[1])}
"""
WATCH = """
import rollgrad
from rollgrad.domain.ports.run_tracker import RunTracker


def on_step(step, metrics, groups):
    if step == 2:
        raise rollgrad.StopTraining("two steps are enough")
    return {"mine/prompts": len(groups)}


class Curve(RunTracker):
    def __init__(self, run):
        self.path = run.directory / "curve.txt"

    def log(self, step, metrics):
        self.path.write_text(f"{step} {metrics['policy/scaled_ratio']:.2f} {metrics.get('mine/prompts')}")
"""


@pytest.fixture
def workspace(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a dataset, a reward function and a configuration of two steps."""
    rows = [{"input": f"What is {a} plus {b}?", "label": str(a + b)} for a in range(1, 4) for b in range(1, 4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text(REWARD)
    settings = {
        "actor": {"model_name_or_path": str(tiny_model_dir), "dtype": "float32", "adam": {"lr": 1e-3}},
        "data": {"prompt_dataset": "prompts.jsonl"},
        "reward": {"function_path": "reward.py", "pass_threshold": 0.5},
        "rollout": {"batch_size": 3, "n_samples_per_prompt": 3, "max_new_tokens": 6},
        "train": {"max_steps": 2, "seed": 5},
        "logger": {"console": False},
        "ckpt": {"output_dir": "out", "overwrite": True},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*flags: str) -> list[dict[str, float]]:
    """The metrics of a run."""
    assert main(["train", "rl", "--config", "run.yaml", *" ".join(flags).split()]) == 0
    rows = logged(Path("out"))
    assert all(value == value and value is not None for row in rows for value in row.values())
    return rows


EXTRA = {
    "vapo": "--critic.freezing_steps 1",
    "pass_at_k": "--algo.advantage.pass_k 2",
    "gigpo": "--agent.attempts 2 --rollout.stop_strings a e i o u n s t",
    "on_policy_distill": "--ref.model_name_or_path {model}",
    "iw_opd": "--ref.model_name_or_path {model}",
    "sdft": "--algo.kl.teacher_template {{prompt}}{{label}}",
    "tis": "--algo.preset grpo,tis",
    "icepop": "--algo.preset grpo,icepop",
    "seq_mask_tis": "--algo.preset dr_grpo,seq_mask_tis",
    "opsm": "--algo.preset gspo,opsm",
    "m2po": "--algo.preset dr_grpo,m2po",
}
QUICK = ("grpo", "vapo", "gspo", "tis", "remax")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in PRESETS])
def test_every_preset_trains(workspace: Path, tiny_model_dir: Path, name: str) -> None:
    extra = EXTRA.get(name, "").format(model=tiny_model_dir)
    flags = extra if "--algo.preset" in extra else f"--algo.preset {name} {extra}"
    rows = train(flags)
    assert [row["step"] for row in rows] == [1, 2]
    trained = [row for row in rows if "policy/loss" in row]
    assert len(trained) == (1 if name == "vapo" else 2)
    for row in trained:
        assert row["policy/mismatch_abs"] < 1e-3
        assert row["policy/mismatch_effective_sample_share"] == pytest.approx(1.0, abs=1e-3)
        if name not in ("on_policy_distill", "iw_opd", "sdpo"):  # the teacher is the student itself, or silent
            assert row["policy/grad_norm"] > 0


def test_a_policy_comes_nearer_to_its_teacher_on_its_own_replies(workspace: Path, tiny_model_dir: Path) -> None:
    """The full estimator is the whole loss, however the step is divided; the teacher's most likely tokens are less."""
    teacher = moved_copy(tiny_model_dir, workspace / "teacher")
    flags = (
        f"--algo.preset on_policy_distill --ref.model_name_or_path {teacher} --algo.kl.use_loss "
        "--algo.kl.estimator full --actor.adam.lr 5e-3 --rollout.temperature 0.8"
    )
    rows = train(flags, "--train.max_steps 8")
    assert [row["policy/loss"] for row in rows] == pytest.approx([row["policy/ref_kl"] for row in rows], rel=1e-5)
    assert 0 < rows[-1]["policy/ref_kl"] < 0.7 * rows[0]["policy/ref_kl"]
    first = {name: rows[0][f"policy/{name}"] for name in ("ref_kl", "grad_norm", "entropy")}
    divided = train(flags, "--train.max_steps 1 --train.max_tokens_per_micro_batch 40")[0]
    assert {name: divided[f"policy/{name}"] for name in first} == pytest.approx(first, rel=1e-3)
    coarse = train(flags, "--train.max_steps 1 --algo.kl.top_k 5")[0]
    assert 0 < coarse["policy/ref_kl"] < first["ref_kl"]
    # All tokens, predicted before, are the vocabulary, over several optimizer steps of a rollout, too.
    more = "--train.max_steps 2 --train.max_epochs 2"
    beside, before = train(flags, more), train(flags, more, "--algo.kl.top_k 100000")
    for row, expected in zip(before, beside, strict=True):
        assert {name: row[f"policy/{name}"] for name in first} == pytest.approx(
            {name: expected[f"policy/{name}"] for name in first}, rel=1e-3
        )


def test_a_teacher_behind_a_server_teaches_as_one_in_the_process(workspace: Path, tiny_model_dir: Path) -> None:
    """By the log-probs of sampled tokens, and by its most likely ones; it is asked once for each reply."""
    teacher = moved_copy(tiny_model_dir, workspace / "teacher")
    server = TeacherServer(teacher)
    try:
        for how in ("", "--algo.kl.use_loss --algo.kl.estimator full --algo.kl.top_k 8 --train.max_epochs 2"):
            flags = f"--algo.preset on_policy_distill --ref.model_name_or_path {teacher} {how}"
            own, served = train(flags), train(flags, f"--ref.url {server.url}")
            replies = sum(round(row["rollout/prompts_played"]) for row in served) * 3
            assert len(server.asked) == replies
            server.bodies.clear()
            for name in ("policy/ref_kl", "policy/loss", "policy/grad_norm"):
                assert [row[name] for row in served] == pytest.approx([row[name] for row in own], rel=5e-3, abs=1e-5)
    finally:
        server.close()
    assert main(["train", "rl", "--config", "run.yaml", *flags.split(), "--ref.url", server.url]) == 2


def test_each_datasource_has_a_teacher_of_its_own(
    workspace: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reply is taught what its own teacher would teach it alone; rows without a teacher, teachers without rows, and
    one with other tokens are refused before anything is sampled."""
    rows = [json.loads(line) for line in Path("prompts.jsonl").read_text().splitlines()]
    named = [row | {"datasource": ("math", "code")[place % 2]} for place, row in enumerate(rows)]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, named)))
    flags = "--algo.preset on_policy_distill --train.max_steps 1"

    def learned(*of: str) -> tuple[dict[str, float], dict[tuple[int, int], tuple[str, list[float]]]]:
        """Returns the metrics of a step, and the datasource and the advantages of each reply."""
        (metrics,) = train(flags, *of)
        kept = read_trajectories(Path("out/trajectories/step-000001.parquet")).to_pylist()
        replies = {(r["group_id"], r["sample_id"]): (r["datasource"], r["token_advantage"]) for r in kept}
        return metrics, replies

    def refused(*of: str) -> str:
        assert main(["train", "rl", "--config", "run.yaml", *" ".join([flags, *of]).split()]) == 2
        return capsys.readouterr().err

    teachers = {
        name: TeacherServer(moved_copy(tiny_model_dir, workspace / name, seed))
        for seed, name in enumerate(("one", "two"))
    }
    one, two = (server.url for server in teachers.values())
    try:
        metrics, replies = learned(f"--ref.urls math teacher@{one} code teacher@{two}")
        alone = {
            name: learned(f"--ref.url {url} --ref.model_name_or_path {workspace / teacher}")
            for name, url, teacher in (("math", one, "one"), ("code", two, "two"))
        }
        assert {datasource for datasource, _ in replies.values()} == {"math", "code"}
        for reply, (datasource, advantages) in replies.items():
            assert (datasource, advantages) == alone[datasource][1][reply]
        for name, (of_all, _) in alone.items():
            assert metrics[f"policy/ref_kl/{name}"] == pytest.approx(of_all[f"policy/ref_kl/{name}"])
        full = "--algo.kl.use_loss --algo.kl.estimator full --algo.kl.top_k 8"
        apart, whole = (
            learned(full, f"--ref.url {one} --ref.model_name_or_path {workspace / 'one'}", of)[0]
            for of in (f"--ref.urls math teacher@{one}", "")
        )
        assert apart["policy/ref_kl"] == pytest.approx(whole["policy/ref_kl"])
        for server in teachers.values():
            server.bodies.clear()
        assert "Rows of 'code' have no teacher" in refused(f"--ref.urls math teacher@{one}")
        assert "ref.urls names 'maths'" in refused(f"--ref.urls maths {one} --ref.url {two}")
        assert "none is 'no'" in refused(f"--ref.urls math no@{one} code teacher@{two}")
        teachers["two"].tokenize = lambda text, **_: BatchEncoding({"input_ids": [*map(ord, text)]})
        assert "as the tokens [84, 104" in refused(f"--ref.urls math teacher@{one} code teacher@{two}")
        assert not teachers["one"].asked
    finally:
        for server in teachers.values():
            server.close()


@pytest.mark.parametrize(
    ("adapters", "estimator"),
    [
        ("", "k3"),
        ("--actor.lora.rank 4", "full --algo.kl.top_k 8"),
        pytest.param("", "full --algo.kl.top_k 8", marks=pytest.mark.wide),
        pytest.param("--actor.lora.rank 4", "k3", marks=pytest.mark.wide),
    ],
)
def test_a_reference_moves_toward_the_policy(workspace: Path, adapters: str, estimator: str) -> None:
    """After two optimizer steps it is the policy itself, or has come nearer."""
    flags = (
        f"--algo.advantage.estimator group_norm --algo.kl.init_coef 0.1 --algo.kl.use_loss --algo.kl.estimator "
        f"{estimator} --actor.adam.lr 5e-3 --train.max_steps 4 {adapters}"
    )
    still, reset, nearer = (
        [row["policy/ref_kl"] for row in train(flags, moving)]
        for moving in ("", "--algo.kl.ref_sync_steps 2 --algo.kl.ref_mixup 1", "--algo.kl.ref_sync_steps 2")
    )
    assert still[:2] == reset[:2] == nearer[:2]
    assert [distance > 1e-6 for distance in reset] == [False, True, False, True]
    assert 1e-6 < nearer[2] < 0.5 * still[2]
    assert not (workspace / "out" / "model" / "ema").exists()


def test_a_teacher_reads_what_the_policy_does_not(workspace: Path, tiny_model_dir: Path) -> None:
    """Advantages are the log-ratios that transformers computes: of a reply after what the teacher reads, and after the
    prompt. The whole divergence, and the norm of its gradient, are of the same two, and it falls."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [json.loads(line) | {"source": "the book"} for line in Path("prompts.jsonl").read_text().splitlines()]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("more.txt").write_text("{prompt}\nIt is {label}, as {source} says.")
    flags = "--algo.preset opsd --algo.kl.teacher_template more.txt"
    train(flags, "--train.max_steps 1")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64)

    def logprobs(question: str, reply: list[int]) -> Tensor:
        """Returns those of the whole vocabulary at each token of the reply."""
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        logits: Tensor = model(torch.tensor([[*prompt, *reply]])).logits
        return logits[0, len(prompt) - 1 : -1].log_softmax(1)

    kept = read_trajectories(Path("out/trajectories/step-000001.parquet")).to_pylist()
    assert len(kept) == 9
    policy, teacher = [], []
    for row in kept:
        first = row["prompt_tokens"]
        reply, question = row["token"][first:], json.loads(row["messages"])[0]["content"]
        policy.append(logprobs(question, reply))
        teacher.append(logprobs(f"{question}\nIt is {row['label']}, as the book says.", reply).detach())
        expected = (teacher[-1] - policy[-1].detach()).gather(1, torch.tensor(reply)[:, None])[:, 0]
        found = torch.tensor(row["token_advantage"][first:], dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    full = "--algo.kl.use_loss --algo.kl.estimator full"
    for beta, (p, q) in ((0, (torch.cat(teacher), torch.cat(policy))), (1, (torch.cat(policy), torch.cat(teacher)))):
        divergence = (p.exp() * (p - q)).sum(1).mean()
        gradients = torch.autograd.grad(divergence, list(model.parameters()), retain_graph=True)
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        for predicted in ("", "--algo.kl.top_k 100000"):
            (row,) = train(flags, full, f"--algo.kl.beta {beta} --train.max_steps 1", predicted)
            assert row["policy/ref_kl"] == pytest.approx(float(divergence.detach()), rel=1e-3)
            assert row["policy/grad_norm"] == pytest.approx(norm, rel=1e-3)
    divergences = [row["policy/ref_kl"] for row in train(flags, full, "--train.max_steps 9")]
    assert 0 < max(divergences[-3:]) < 0.7 * min(divergences[:2])


@pytest.mark.parametrize("pipeline", ["alternating", "overlapping"])
def test_replies_that_passed_teach_the_others_of_their_group(workspace: Path, pipeline: str) -> None:
    """A rollout is taught where another one of its group passed; the whole divergence is of the same rollouts."""
    flags = "--algo.preset sdpo --rollout.n_samples_per_prompt 4 --reward.pass_threshold 0.75 --train.max_steps 2"
    if pipeline == "overlapping":
        flags += " --train.async_enable --train.max_staleness 1 --train.partial_rollout keep"
    rows = train(flags)
    taught_shares = []
    for step in (1, 2):
        kept = read_trajectories(Path(f"out/trajectories/step-00000{step}.parquet")).to_pylist()
        taught = []
        for row in kept:
            others = [r for r in kept if r["group_id"] == row["group_id"] and r["sample_id"] != row["sample_id"]]
            taught.append(any(other["score"] >= 0.75 for other in others))
            advantages = [a for a in row["token_advantage"] if a]
            assert bool(advantages) == taught[-1]
        taught_shares.append(sum(taught) / len(taught))
    assert 0 < sum(taught_shares) < 2
    assert [row.get("policy/taught_share", 1.0) for row in rows] == pytest.approx(taught_shares)
    if pipeline == "alternating":
        full = train(flags, "--algo.kl.use_loss --algo.kl.estimator full --algo.kl.top_k 8")
        assert full[0].get("policy/taught_share", 1.0) == pytest.approx(taught_shares[0])
        assert full[0]["policy/ref_kl"] > 0
        assert main(["train", "rl", "--config", "run.yaml", *flags.split(), "--rollout.n_samples_per_prompt", "1"]) == 2
        assert main(["train", "rl", "--config", "run.yaml", *flags.split(), "--reward.function_path", "None"]) == 2


def test_a_teacher_is_told_what_the_reward_says(workspace: Path) -> None:
    """A reply is taught that did not pass and of which the reward says anything, and no other."""
    Path("reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    passed = [sum(map(ord, query)) % 3 == 0 for query in queries]\n"
        "    said = ['too odd' if sum(map(ord, query)) % 2 else None for query in queries]\n"
        "    return {'rewards': [float(p) for p in passed], 'feedback': said}\n"
    )
    template = "{prompt}_Tried:_{reward_feedback}"
    (row,) = train(f"--algo.preset opsd --algo.kl.teacher_template {template} --train.max_steps 1")
    taught = []
    for kept in read_trajectories(Path("out/trajectories/step-000001.parquet")).to_pylist():
        number = sum(map(ord, kept["prompt"] + kept["response"]))
        taught.append(bool(number % 3) and bool(number % 2))
        assert any(kept["token_advantage"]) == taught[-1]
    assert 0 < sum(taught) < len(taught)
    assert row["policy/taught_share"] == pytest.approx(sum(taught) / len(taught))


OF_PRESETS = {settings.get("actor.policy_loss_type", "ppo") for settings in PRESETS.values()}
SEVERAL_STEPS = [
    pytest.param(
        name, marks=[] if name == "clip_cov" else [pytest.mark.slow, *[pytest.mark.wide] * (name in OF_PRESETS)]
    )
    for name in catalogue.POLICY_LOSSES
]


@pytest.mark.parametrize("loss", SEVERAL_STEPS)
def test_every_loss_takes_several_steps_a_rollout(workspace: Path, loss: str) -> None:
    flags = f"--algo.advantage.estimator rloo --actor.policy_loss_type {loss} --train.max_epochs 2"
    rows = train(flags, "--train.batch_size 5", "--actor.cov_share 0.1" if "cov" in loss else "")
    assert all(row["policy/ratio_mean"] != 1.0 for row in rows)


CORRECTIONS = [("token", "ratio"), ("sequence", "binary_kl"), ("geometric", "tv"), ("sequence", "opsm")]
MORE_CORRECTIONS = [
    (level, gate)
    for level in ("token", "sequence", "geometric")
    for gate in ("ratio", "binary_kl", "tv", "opsm")
    if (level, gate) not in (*CORRECTIONS, ("token", "opsm"))  # of which the last is refused
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "gate"), [*CORRECTIONS, *(pytest.param(*each, marks=pytest.mark.wide) for each in MORE_CORRECTIONS)]
)
def test_corrections_weigh_or_leave_out(workspace: Path, level: str, gate: str) -> None:
    mode = "--algo.correction.mode mask" if gate == "ratio" else ""
    flags = f"--algo.advantage.estimator rloo --algo.correction.level {level} --algo.correction.gate {gate} {mode}"
    rows = train(flags)
    assert all(row["policy/correction_weight"] == pytest.approx(1.0, abs=1e-3) for row in rows)
    strict = "--algo.correction.low 1.9" if gate == "ratio" else "--algo.correction.threshold 1e-12"
    if gate == "opsm":  # it goes by the sign of a difference, which in the first step is rounding alone
        _, *rows = train(flags, strict, "--rollout.generate_batch_size 5 --actor.adam.lr 0.01")
    else:
        rows = train(flags, strict)
    assert all(row["policy/correction_dropped_share"] > 0.1 for row in rows)


def test_over_sampled_groups_are_corrected(workspace: Path) -> None:
    rows = train("--algo.preset grpo,tis --rollout.generate_batch_size 5 --actor.adam.lr 0.01")
    assert [row["rollout/kept_for_next"] for row in rows] == [2, 0]
    assert [row["rollout/prompts_played"] for row in rows] == [5, 1]
    assert rows[0]["policy/mismatch_abs"] < 1e-4
    assert rows[1]["policy/mismatch_abs"] > 1e-3, "two of three groups are one update old"


def test_the_second_moment_is_that_of_the_whole_step(workspace: Path) -> None:
    """Fresh samples are all kept; of samples one update old some are not, however the step is divided."""
    flags = "--algo.preset dr_grpo,m2po --rollout.generate_batch_size 5 --actor.adam.lr 0.01"
    fresh, stale = train(flags, "--algo.correction.threshold 1e-4")
    assert fresh["policy/correction_dropped_share"] == 0.0
    assert 0 < stale["policy/correction_dropped_share"] < 1
    _, divided = train(flags, "--algo.correction.threshold 1e-4 --train.max_tokens_per_micro_batch 40")
    assert divided["policy/correction_dropped_share"] == pytest.approx(
        stale["policy/correction_dropped_share"], rel=1e-3
    )


@pytest.mark.slow
def test_interpolated_proximal_logprobs(workspace: Path) -> None:
    rows = train("--algo.preset dr_grpo --algo.old_logprobs interpolate --rollout.generate_batch_size 5")
    assert rows[0]["policy/mismatch_equal_share"] == 1.0
    assert rows[1]["policy/mismatch_equal_share"] < 1.0


def test_a_frozen_actor_leaves_the_critic_alone_to_learn(workspace: Path, tiny_model_dir: Path) -> None:
    flags = "--train.max_steps 6 --critic.freezing_steps 4 --critic.adam.lr 1e-3 --ckpt.save_steps 1"
    rows = train(flags, "--critic.value_clip None --rollout.n_samples_per_prompt 8")
    assert ["policy/loss" in row for row in rows] == [False] * 4 + [True] * 2
    assert rows[3]["critic/value_loss"] < rows[0]["critic/value_loss"]
    from safetensors.torch import load_file

    def saved(name: str) -> dict[str, torch.Tensor]:
        return load_file(Path("out", name, "model.safetensors"))

    start = load_file(tiny_model_dir / "model.safetensors")
    assert all(torch.equal(start[key], tensor) for key, tensor in saved("step_4").items())
    assert any(not torch.equal(start[key], tensor) for key, tensor in saved("step_5").items())


def test_a_critic_starts_from_a_reward_model_which_also_judges(workspace: Path, tiny_model_dir: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.1)
    model.save_pretrained("rm")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path("rm", name).write_bytes((tiny_model_dir / name).read_bytes())
    from_zero = train("--train.max_steps 1")
    from_reward_model = train("--train.max_steps 1 --critic.model_name_or_path rm")
    assert from_zero[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert abs(from_reward_model[0]["critic/explained_variance"]) > 1e-3
    config = rollgrad.load_config("run.yaml")
    config.train.max_steps, config.reward.timeout = 1, 300.0
    config.reward.function_path, config.reward.model_name_or_path = None, "rm"
    played: list[Trajectory] = []

    def keep(step: int, metrics: Mapping[str, float], groups: Sequence[RolloutGroup]) -> None:
        assert (step, metrics["rollout/samples"]) == (1, 9.0)
        played.extend(t for group in groups for t in group.trajectories)

    rollgrad.train(config, on_step=keep)
    judge = AutoModelForSequenceClassification.from_pretrained("rm", dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = [float(judge(trajectory.token_ids_T[None]).logits) for trajectory in played]
    assert [trajectory.reward for trajectory in played] == pytest.approx(wanted, abs=1e-5)
    assert len(played) == 9


@pytest.mark.slow
def test_shaping_from_the_command_line(workspace: Path) -> None:
    plain = train("--algo.advantage.estimator rloo")
    weighted = train("--algo.advantage.estimator rloo --reward.weights letters 2 short 0")
    assert weighted[0]["reward/mean"] == pytest.approx(2 * plain[0]["reward/letters"], rel=1e-5)
    overlong = train("--algo.advantage.estimator rloo --reward.overlong_buffer_len 6")
    assert overlong[0]["reward/shaped_mean"] < overlong[0]["reward/mean"]
    running = train("--algo.advantage.estimator rloo --reward.normalize running")
    assert running[0]["reward/shaped_mean"] == pytest.approx(0.0, abs=1e-5)
    cosine = train("--algo.advantage.estimator rloo --reward.cosine_length --reward.cosine_exceeded -3")
    assert cosine[0]["reward/shaped_mean"] != cosine[0]["reward/mean"]


@pytest.mark.slow
def test_an_adaptive_entropy_bonus(workspace: Path) -> None:
    rows = train("--algo.advantage.estimator rloo --actor.entropy_target 50 --actor.entropy_coef_step 0.1")
    assert [row["policy/entropy_coef"] for row in rows] == pytest.approx([0.1, 0.2])


def test_algorithms_of_ones_own(workspace: Path) -> None:
    Path("mine.py").write_text(PLUGIN)
    flags = "--algo.extension_path mine.py --algo.advantage.estimator mine --actor.policy_loss_type mine_too"
    flags += " --actor.entropy_coef 0"
    rows = train(flags)
    assert len(rows) == 2
    kl = "--algo.kl.init_coef 0.1 --algo.kl.estimator constant"
    charged = train(flags, kl)
    assert [row["policy/ref_kl"] for row in charged] == pytest.approx([2.0, 2.0])
    kept = train(flags, kl, "--algo.kl.use_loss")
    assert [row["policy/ref_kl"] for row in kept] == pytest.approx([2.0, 2.0])
    Path("watch_of_mine.py").write_text(WATCH)
    watched = "--train.max_steps 5 --train.on_step_path watch_of_mine --logger.report_to watch_of_mine:Curve"
    scaled = train(flags, "--algo.losses.mine_too.scale 3", watched)
    assert [row["policy/scaled_ratio"] for row in scaled] == pytest.approx([3.0, 3.0])
    assert [row.get("mine/prompts") for row in scaled] == [3.0, None]
    assert Path("out", "curve.txt").read_text() == "2 3.00 None"
    assert json.loads(Path("out", "run.json").read_text())["reason"] == "on_step: two steps are enough"
    assert scaled[0]["policy/grad_norm"] == pytest.approx(3 * rows[0]["policy/grad_norm"], rel=1e-3)
    assert "scale: 3.0" in Path("out", "config.yaml").read_text()


def test_a_function_of_each_step_asks_the_policy(workspace: Path) -> None:
    Path("asks.py").write_text(ASKS)
    plain = train("--algo.advantage.estimator rloo")
    asked = train("--algo.advantage.estimator rloo --train.on_step_path asks.py")
    assert [row["mine/replies"] for row in asked] == [3.0, 3.0]
    assert [row["mine/same"] for row in asked] == [1.0, 1.0]
    overlapping = train("--algo.advantage.estimator rloo --train.async_enable --train.on_step_path asks.py")
    assert [row["mine/same"] for row in overlapping] == [1.0, 1.0]
    alike = [name for name in plain[0] if name.startswith(("policy/", "reward/")) and not name.endswith("_s")]
    assert [[row[name] for name in alike] for row in plain] == [[row[name] for name in alike] for row in asked]


def test_an_optimizer_and_a_schedule_of_ones_own(workspace: Path) -> None:
    Path("rates.py").write_text("def halved(step, total_steps):\n    return 0.5 ** step\n")
    flags = "--actor.optim_path torch.optim:SGD --actor.lr_scheduler_path rates.py:halved --actor.adam.lr 0.5"
    rows = train("--algo.advantage.estimator rloo", flags)
    assert [row["policy/lr"] for row in rows] == pytest.approx([0.5, 0.25])


def test_presets_are_shown_and_overridden(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--algo.preset", "dapo,tis", "--actor.eps_clip_low_high", "0.1", "0.3", "--print_config"]
    assert main(["train", "rl", "--config", "run.yaml", *flags]) == 0
    shown = capsys.readouterr().out
    config = structure_config(yaml.safe_load(shown))
    assert config.algo.advantage.estimator == "group_norm"
    assert config.algo.dynamic_filtering_enable
    assert config.algo.correction.level == "token"
    assert config.actor.eps_clip_low_high == (0.1, 0.3), "a flag overrides the preset"
    assert config.rollout.n_samples_per_prompt == 3, "so does the file"
    assert config.algo.preset is None
    assert main(["train", "rl", "--algo.preset", "dappo"]) == 2
    assert "none of ppo, vapo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--algo.extension_path nowhere.py", "there is no such file"),
        ("--algo.extension_path broken.py", "cannot be imported: NameError"),
        ("--algo.advantage.estimator mine", "none of gae"),
        (
            "--algo.kl.estimator mine",
            "none of k1, k2, k3, k3_unbiased, abs, full: change --algo.kl.estimator, or define it",
        ),
        ("--algo.preset gdpo --reward.verifier exact_match --reward.function_path None", "the reward has no names"),
        ("--algo.preset dapo --algo.dynamic_filtering_range 0.9 0.95", "dynamic filtering kept only"),
        ("--reward.weights letters 1", "give one weight to each"),
    ],
)
def test_mistakes_are_one_sentence(
    workspace: Path, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.py").write_text("undefined")
    assert main(["train", "rl", "--config", "run.yaml", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
