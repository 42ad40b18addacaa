"""Scores of tiny random sequence classifiers: one by one, together, truncated, from disk."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from rollgrad.adapters.models.torch.rewards.reward_model import RewardModel
from rollgrad.adapters.models.torch.rewards.reward_text import needs_bos, same_vocabulary
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.domain.algorithms.shaping_settings import Normalise
from rollgrad.domain.episodes.rewards import RewardInput
from rollgrad.domain.errors import CheckpointError, ConfigurationError
from rollgrad.entrypoints.composition.rl.rewards import make_reward_model
from tests.fakes.chat_templates import tokenizer_with
from tests.tiny_models import saved, tiny_model

TEXTS = ["The answer is 7.", "7", "What is 3 plus 4? The answer is 42." * 5, "You are helpful.", "x y z " * 9]
POSITIONS = 256


def classifier(family: str, tokenizer: Any, *, num_labels: int = 1) -> Any:
    name = f"{family}ForSequenceClassification"
    return tiny_model(name, tokenizer, seed=1, num_labels=num_labels, max_position_embeddings=POSITIONS)


@pytest.fixture
def tokenizer(tiny_tokenizer: Any) -> Any:
    """One that a test may change."""
    return copy.deepcopy(tiny_tokenizer)


def by_transformers(model: Any, tokens: list[int]) -> float:
    """The score as transformers computes it for one text."""
    with torch.no_grad():
        return float(model(torch.tensor([tokens])).logits)


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch_tokens", [1, 200, 16384])
def test_together_as_one_by_one(tokenizer: Any, family: str, side: str, batch_tokens: int) -> None:
    tokenizer.padding_side = side
    model = classifier(family, tokenizer)
    expected = [by_transformers(model, tokenizer(text)["input_ids"]) for text in TEXTS]
    found = RewardModel(model, tokenizer, batch_tokens=batch_tokens).score(TEXTS)
    assert found == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.01, "texts that score alike would show nothing"


def test_scores_of_a_model_in_half_precision_have_no_ties_by_rounding(tokenizer: Any) -> None:
    scores = torch.tensor(RewardModel(classifier("Llama", tokenizer).bfloat16(), tokenizer).score(TEXTS))
    assert (scores != scores.bfloat16()).sum() >= len(TEXTS) - 1, "their head computes in float32"


def test_the_capped_scores_of_gemma_2_are_capped(tokenizer: Any, tmp_path: Path) -> None:
    """transformers loads it with an attention that leaves the caps out."""
    settings = {"head_dim": 8, "attn_logit_softcapping": 0.5, "num_labels": 1}
    made = tiny_model("Gemma2ForSequenceClassification", tokenizer, seed=1, **settings)
    model = RewardModel.load(
        str(saved(made, tokenizer, tmp_path)), dtype=torch.float32, device=torch.device("cpu"), flag="--model"
    )
    by_default = [by_transformers(made, tokenizer(text)["input_ids"]) for text in TEXTS]
    made.set_attn_implementation("eager")
    expected = [by_transformers(made, tokenizer(text)["input_ids"]) for text in TEXTS]
    assert model.score(TEXTS) == pytest.approx(expected, abs=1e-5)
    assert by_default != pytest.approx(expected, abs=1e-3), "the caps must matter"


def test_padding_named_like_the_end_changes_nothing(tokenizer: Any) -> None:
    """Many models pad with the end-of-sequence token, at which the score is read."""
    model = classifier("Llama", tokenizer)
    expected = RewardModel(model, tokenizer).score(TEXTS)
    tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.eos_token_id
    assert RewardModel(model, tokenizer).score(TEXTS) == pytest.approx(expected, abs=1e-5)


def test_no_forward_pass_is_larger_than_asked(tokenizer: Any) -> None:
    model = classifier("Llama", tokenizer)
    shapes: list[tuple[int, ...]] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    reward_model = RewardModel(model, tokenizer, batch_tokens=64)
    lengths = [len(reward_model.encode(text).tokens) for text in TEXTS]
    reward_model.score(TEXTS)
    assert sum(rows for rows, _ in shapes) == len(TEXTS)
    assert all(rows * width <= 64 or rows == 1 for rows, width in shapes)
    assert {width for _, width in shapes} <= set(lengths), "no row is padded beyond the longest of its batch"


CONVERSATION = [{"role": "user", "content": "Add 2 and 3."}]
ENDS = {"gemma3": "<end_of_turn>", "phi3": "<|end|>", "qwen2_5": "<|im_end|>", "llama3_1": "<|eot_id|>"}
"""Templates, and what ends a reply in them; the tokenizer's end-of-sequence token is another."""


@pytest.fixture(params=ENDS)
def family(request: pytest.FixtureRequest, tiny_tokenizer: Any) -> tuple[Any, str]:
    """A tokenizer with a model family's template, whose end of turn is not its end of sequence; and the end of turn."""
    tokenizer = tokenizer_with(request.param, tiny_tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<|sequence_ends|>"})
    return tokenizer, ENDS[request.param]


def replied(tokenizer: Any, text: str) -> RewardInput:
    """The parts of a reply that the executor hands over."""
    prompt = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    tokens = [*tokenizer(prompt)["input_ids"], *tokenizer(text)["input_ids"]]
    return RewardInput(text=tokenizer.decode(tokens), token_ids=tuple(tokens))


@pytest.mark.parametrize("finished", [True, False])
def test_a_model_of_the_policy_s_vocabulary_scores_the_very_tokens(family: tuple[Any, str], finished: bool) -> None:
    """Also those that no tokenizer would make of the text."""
    tokenizer, end = family
    model = classifier("Llama", tokenizer)
    reply = replied(tokenizer, "It is 5." + end * finished)
    assert reply.token_ids is not None
    apart = [token for letter in " is" for token in tokenizer(letter)["input_ids"]]
    odd = RewardInput(text=reply.text + " is", token_ids=(*reply.token_ids, *apart))
    reward_model = RewardModel(model, tokenizer, policy_tokenizer=copy.deepcopy(tokenizer))
    scores = [score for score, truncated in reward_model.judge([reply, odd])]
    expected = [by_transformers(model, list(each.token_ids or ())) for each in (reply, odd)]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert reward_model.encode(odd.text).tokens != odd.token_ids, "otherwise the text would do"


@pytest.mark.parametrize("behind", ["", "\n"])
@pytest.mark.parametrize("finished", [True, False])
def test_a_text_keeps_its_end_and_gets_no_other(family: tuple[Any, str], finished: bool, behind: str) -> None:
    """Policies with another vocabulary, and HTTP, give only the text."""
    tokenizer, end = family
    text = replied(tokenizer, "It is 5." + end * finished).text
    tokens = RewardModel(classifier("Llama", tokenizer), tokenizer).encode(text + behind * finished).tokens
    assert tokenizer.decode(list(tokens)) == text
    assert (tokens[-1] == tokenizer.convert_tokens_to_ids(end)) is finished
    assert tokenizer.eos_token_id not in tokens


def test_another_vocabulary_is_told_by_its_ids(tokenizer: Any) -> None:
    more = copy.deepcopy(tokenizer)
    more.add_special_tokens({"additional_special_tokens": ["<|reward|>"]})
    assert same_vocabulary(tokenizer, more), "a model may know more tokens than the policy"
    assert not same_vocabulary(more, tokenizer)
    model, reply = classifier("Llama", tokenizer), RewardInput(text="Hello", token_ids=(5, 6, 7))
    assert RewardModel(model, tokenizer, policy_tokenizer=more).encode_reply(reply).tokens != reply.token_ids
    own = RewardModel(model, tokenizer, policy_tokenizer=tokenizer)
    assert own.encode_reply(reply).tokens == reply.token_ids
    padding = RewardInput(text="Hello", token_ids=(5, len(tokenizer)))  # a row that no token has, sampled all the same
    assert own.encode_reply(padding) == own.encode("Hello")
    assert own.encode_reply(RewardInput(text="Hello")) == own.encode("Hello"), "an answer that nobody sampled"


def test_tokens_that_are_too_many_lose_their_beginning_only(tokenizer: Any) -> None:
    tokenizer.bos_token = "<|im_start|>"
    model = RewardModel(classifier("Llama", tokenizer), tokenizer, policy_tokenizer=tokenizer, max_length=16)
    tokens = (tokenizer.bos_token_id, *range(20, 60))
    encoded = model.encode_reply(RewardInput(text="", token_ids=tokens))
    assert encoded.truncated
    assert encoded.tokens == (tokenizer.bos_token_id, *range(45, 60))
    judged = model.judge([RewardInput(text="", token_ids=each) for each in (tokens[:16], tokens[:17])])
    assert [truncated for _, truncated in judged] == [False, True]


def test_a_long_text_loses_its_beginning_only(tokenizer: Any) -> None:
    model = RewardModel(classifier("Llama", tokenizer), tokenizer, max_length=16)
    reply = "The answer is 7."
    short, long = model.encode(reply), model.encode("a" * 100 + reply)
    assert not short.truncated
    assert long.truncated
    assert len(long.tokens) == 16
    assert long.tokens[-len(short.tokens) :] == short.tokens


def test_the_beginning_of_sequence_stays_and_is_there_once(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer.bos_token = "<|im_start|>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    model = RewardModel(classifier("Llama", tokenizer), tokenizer, max_length=16)
    assert model.encode("<|im_start|>Hi") == model.encode("Hi")
    assert model.encode("Hi").tokens[0] == bos
    long = model.encode("a" * 100 + "Hi")
    assert len(long.tokens) == 16
    assert long.tokens[0] == bos
    assert bos not in long.tokens[1:]
    assert long.tokens[-len(model.encode("Hi").tokens) + 1 :] == model.encode("Hi").tokens[1:]
    assert not any(needs_bos(begun, tokenizer) for begun in ([bos, 5], (bos, 5)))  # those of images are a tuple
    assert needs_bos((5,), tokenizer)


def test_by_default_the_model_s_positions_are_the_limit(tokenizer: Any) -> None:
    model = RewardModel(classifier("Llama", tokenizer), tokenizer)
    assert len(model.encode("a b " * POSITIONS).tokens) == POSITIONS
    for allowed in (2, POSITIONS):
        RewardModel(classifier("Llama", tokenizer), tokenizer, max_length=allowed)
    for refused in (1, POSITIONS + 1):
        with pytest.raises(ConfigurationError, match=rf"--max_length is {refused}"):
            RewardModel(classifier("Llama", tokenizer), tokenizer, max_length=refused)
    with pytest.raises(ConfigurationError, match=r"--batch_tokens is 0"):
        RewardModel(classifier("Llama", tokenizer), tokenizer, batch_tokens=0)


def test_a_text_without_tokens_is_refused(tokenizer: Any) -> None:
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="without tokens"):
        RewardModel(classifier("Llama", tokenizer), tokenizer).score([""])


def test_a_text_that_cannot_be_scored_leaves_no_other_process_waiting(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.eos_token = None
    others = iter([True, False])  # another process makes one pass
    whose = "rollgrad.adapters.models.torch.rewards.together.PassesTogether._any_has"
    monkeypatch.setattr(whose, lambda self, mine: mine or next(others))
    passes: list[Any] = []

    def divide(module: Any) -> Any:
        def passed(*inputs: Any) -> Any:
            passes.append(inputs)
            return module(*inputs)

        return passed

    with pytest.raises(ValueError, match="without tokens"):
        RewardModel(classifier("Llama", tokenizer), tokenizer, divide=divide).judge([RewardInput(text="")])
    assert len(passes) == 1


def load(path: Path) -> RewardModel:
    return RewardModel.load(str(path), dtype=torch.float32, device=torch.device("cpu"), flag="--model")


def test_loaded_it_scores_the_same(tokenizer: Any, tmp_path: Path) -> None:
    model = classifier("Llama", tokenizer)
    expected = RewardModel(model, tokenizer).score(TEXTS)
    assert load(saved(model, tokenizer, tmp_path / "rm")).score(TEXTS) == pytest.approx(expected, abs=1e-5)


def test_a_head_whose_configuration_says_nothing_loads(tokenizer: Any, tmp_path: Path) -> None:
    """As OpenRLHF saves reward models: the configuration is the language model's."""
    import json

    model = classifier("Llama", tokenizer)
    expected = RewardModel(model, tokenizer).score(TEXTS)
    path = saved(model, tokenizer, tmp_path / "rm") / "config.json"
    config = json.loads(path.read_text())
    for key in ("id2label", "label2id", "problem_type"):
        config.pop(key, None)
    path.write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    assert load(path.parent).score(TEXTS) == pytest.approx(expected, abs=1e-5)


def test_what_is_no_reward_model_is_refused(tokenizer: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no reward model \(its weights lack score.weight\)"):
        load(tiny_model_dir)
    with pytest.raises(CheckpointError, match="several numbers"):
        load(saved(classifier("Llama", tokenizer, num_labels=3), tokenizer, tmp_path / "three"))
    biased = classifier("Llama", tokenizer)
    biased.score = torch.nn.Linear(biased.score.in_features, 1)
    with pytest.raises(CheckpointError, match=r"its head has score.bias besides, .* in a function \(--reward.func"):
        load(saved(biased, tokenizer, tmp_path / "biased"))
    with pytest.raises(CheckpointError, match="no such directory"):
        load(tmp_path / "missing")


def test_an_encoder_s_classifier_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no head `score` at the last token"):
        load(saved(classifier("Bert", tokenizer), tokenizer, tmp_path / "bert"))


def with_moments(tokenizer: Any, path: Path, **moments: Any) -> Path:
    """A reward model as OpenRLHF saves it: `mean` and `std` of its scores in config.json."""
    model = classifier("Llama", tokenizer)
    for name, value in moments.items():
        setattr(model.config, name, value)
    return saved(model, tokenizer, path)


def load_normalised(path: Path) -> RewardModel:
    cpu = torch.device("cpu")
    return RewardModel.load(str(path), dtype=torch.float32, device=cpu, flag="--reward", normalize=True)


def test_scores_are_scaled_by_what_the_model_was_saved_with(tokenizer: Any, tmp_path: Path) -> None:
    path = with_moments(tokenizer, tmp_path / "model", mean=0.5, std=4.0)
    with capture_logs() as silent:
        scaled = load_normalised(path).score(TEXTS)
    with capture_logs() as logs:
        plain = load(path).score(TEXTS)
    assert scaled == pytest.approx([(score - 0.5) / 4.0 for score in plain])
    assert silent == []
    (said,) = logs
    assert said["log_level"] == "warning"
    assert (said["mean"], said["std"], said["to_use_them"]) == (0.5, 4.0, "--reward.normalize model")


def test_a_run_s_reward_model_is_scaled_where_it_is_asked_for(tokenizer: Any, tmp_path: Path) -> None:
    """In this process and in those of a cluster, which build it by the same function."""
    path = with_moments(tokenizer, tmp_path / "model", mean=0.5, std=4.0)
    config = RLConfig()
    config.actor.model_name_or_path = config.reward.model_name_or_path = str(path)
    config.actor.dtype = DType.FLOAT32
    plain = make_reward_model(config).score(TEXTS)
    config.reward.normalize = Normalise.MODEL
    assert make_reward_model(config).score(TEXTS) == pytest.approx([(score - 0.5) / 4.0 for score in plain])


@pytest.mark.parametrize(
    "moments", [{}, {"mean": 0.5}, {"mean": 0.5, "std": 0.0}, {"mean": float("nan"), "std": 1.0}], ids=str
)
def test_a_model_without_moments_is_not_normalised_in_silence(
    tokenizer: Any, tmp_path: Path, moments: dict[str, float]
) -> None:
    path = with_moments(tokenizer, tmp_path / "model", **moments)
    with pytest.raises(ConfigurationError, match=r"--reward\.normalize model is set, but config\.json .* has mean"):
        load_normalised(path)
    with capture_logs() as logs:
        load(path)
    assert logs == []
