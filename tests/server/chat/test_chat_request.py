"""Bodies of chat clients: what is understood, what is ignored, what is refused and by which name."""

from typing import Any

import msgspec
import pytest

from hyco_export.errors import ProtocolError
from hyco_export.protocol.wire import Sampling
from hyco_export.server.chat.chat_request import LONGEST_STOP, ChatRequest, ParameterError, read_request

PLAIN: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def read(**changes: object) -> ChatRequest:
    return read_request(msgspec.json.encode(PLAIN | changes))


def test_what_is_left_open_is_the_recipes() -> None:
    usual = Sampling(0.7, 40, 0.9)
    assert read().sampling(usual) == usual
    assert read(temperature=0, top_k=0, top_p=1).sampling(usual) == Sampling(0.0, 0, 1.0)
    assert read(top_p=None).sampling(usual) == usual


def test_values_that_switch_a_parameter_off_and_those_that_change_no_token_are_taken() -> None:
    off = {
        "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "logprobs": False, "logit_bias": {}, "tools": [],
        "tool_choice": "auto", "response_format": {"type": "text"}, "modalities": ["text"], "top_logprobs": None,
        "reasoning_effort": None, "unheard_of": None,
    }  # fmt: skip
    idle = {"user": "u", "metadata": {"a": "b"}, "store": True, "stream_options": {"include_obfuscation": False}}
    assert read(**off, **idle) == read()


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"min_p": 0.1}, "min_p"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2**40}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ["a", "b" * (LONGEST_STOP + 1)]}, "stop[1]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
    ],
)
def test_a_parameter_that_cannot_be_met_is_refused_by_name(changes: dict[str, object], parameter: str) -> None:
    with pytest.raises(ParameterError) as refused:
        read(**changes)
    assert (refused.value.parameter, refused.value.status) == (parameter, 400)
    assert parameter.split("[")[0] in refused.value.message


def test_a_temperature_too_close_to_0_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"temperature is 0\.001") as refused:
        read(temperature=0.001).sampling(Sampling(1.0, 0, 1.0))
    assert refused.value.parameter == "temperature"


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"\xff"', b'{"a": 1e999}', b'{"a":' + b"[" * 100_000])
def test_what_is_no_json_object_is_malformed(body: bytes) -> None:
    with pytest.raises(ProtocolError) as refused:
        read_request(body)
    assert refused.value.code == "malformed"


def test_seeds_reach_the_whole_range() -> None:
    assert read(seed=2**64 - 1).seed == 2**64 - 1


def test_caps_and_stops_have_two_forms() -> None:
    assert read(max_tokens=3).most_tokens == read(max_completion_tokens=3).most_tokens == 3
    assert read().most_tokens is None
    assert read(stop="a").stops == ("a",) and read(stop=["a", "b"]).stops == ("a", "b") and read().stops == ()


def test_a_conversation_is_roles_and_texts() -> None:
    parts = [{"type": "text", "text": "o"}, {"type": "text", "text": "k"}]
    earlier = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": [], "name": ""}
    turns = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}, earlier]
    assert read(messages=turns).conversation() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ok"},
        {"role": "assistant", "content": "yes"},
    ]


@pytest.mark.parametrize(
    ("message", "parameter"),
    [
        ({"role": "tool", "content": "x"}, "messages[1].role"),
        ({"role": ["user"], "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "user", "content": "x", "name": "Ann"}, "messages[1].name"),
        ({"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, "messages[1].tool_calls"),
    ],
)
def test_a_turn_that_no_text_carries_is_refused_by_place(message: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ParameterError) as refused:
        read(messages=[*PLAIN["messages"], message]).conversation()
    assert refused.value.parameter == parameter
