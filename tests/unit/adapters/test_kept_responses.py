"""Responses that a server keeps: found by their id, within bounds, and never against the client's word."""

from contextlib import suppress
from typing import Any

import pytest

from rollgrad.adapters.servers.guard import HttpError
from rollgrad.adapters.servers.kept_responses import NOT_FOUND, KeptResponses
from rollgrad.adapters.servers.openai_wire import OpenAIWire
from rollgrad.adapters.servers.responses_wire import ResponsesWire
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.messages import ParsedReply

WIRE = ResponsesWire()
REPLY = {"role": "assistant", "content": "yes"}
SAMPLED = Generation(token_ids=[1], logprobs=[0.0], versions=[0], stop_reason=StopReason.STOP)
ANSWERED = ChatReply(parsed=ParsedReply(message=REPLY), generation=SAMPLED, prompt_token_ids=(1,), turn=7)


def keep(kept: KeptResponses, name: str, **body: Any) -> None:
    kept.keep(WIRE.decode({"input": "go", **body}), ANSWERED, lambda: {"id": name})


def known(kept: KeptResponses, *names: str) -> list[str]:
    found = []
    for name in names:
        with suppress(HttpError):
            found.append(kept.answer(name)["id"])
    return found


def test_the_oldest_is_forgotten_beyond_any_bound() -> None:
    now = [0.0]
    kept = KeptResponses(most=2, seconds=10.0, clock=lambda: now[0])
    for name in "abc":
        keep(kept, name)
        now[0] += 1.0
    assert known(kept, *"abc") == ["b", "c"]
    now[0] = 11.5
    assert known(kept, *"abc") == ["c"]
    short = KeptResponses(characters=1000)
    keep(short, "a")
    keep(short, "b", input="x" * 600)
    assert known(short, "a", "b") == ["a", "b"]
    keep(short, "c", input="x" * 700)
    assert known(short, "a", "b", "c") == ["c"]
    keep(short, "d", input="x" * 1001)
    assert known(short, "c", "d") == []
    keep(short, "e")
    assert known(short, "e") == ["e"], "what was forgotten takes no room"


def test_a_client_may_have_nothing_kept_and_forget_what_was() -> None:
    kept = KeptResponses()
    keep(kept, "a", store=False)
    keep(kept, "b", store=True)
    keep(kept, "c", store=None)
    assert known(kept, *"abc") == ["b", "c"]
    kept.drop("b")
    assert known(kept, *"abc") == ["c"]
    with pytest.raises(HttpError, match="No response with the id 'b'"):
        kept.drop("b")
    with pytest.raises(HttpError, match=r"store is 3"):
        WIRE.decode({"input": "go", "store": 3})


def test_a_request_continues_a_conversation_without_its_instructions() -> None:
    kept = KeptResponses()
    keep(kept, "a", instructions="Be brief.")
    for instructions in (None, "Be long."):
        call = kept.call(WIRE, {"input": "Sure?", "previous_response_id": "a", "instructions": instructions})
        said = [{"role": "user", "content": "go"}, REPLY, {"role": "user", "content": "Sure?"}]
        system = [{"role": "system", "content": instructions}] if instructions else []
        assert call.request.messages == system + said
        assert call.body["previous_response_id"] == "a"
        assert call.request.follows == 7
    chat = {"messages": [REPLY], "previous_response_id": "a"}
    assert kept.call(OpenAIWire(), chat).request.messages == [REPLY], "no field of this wire"


@pytest.mark.parametrize("name", ["b", "", 3, ["a"], {}])
def test_an_unknown_one_has_openais_code(name: Any) -> None:
    kept = KeptResponses()
    keep(kept, "a")
    with pytest.raises(HttpError, match="Send the whole conversation") as refused:
        kept.call(WIRE, {"input": "Sure?", "previous_response_id": name})
    assert (refused.value.status_code, refused.value.code) == (400, NOT_FOUND)
