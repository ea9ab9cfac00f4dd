"""What ordinary clients send, through Dynamo's own frontend: JSON, tools, and the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.deployments import MODEL_NAME, Served, demo_config, served

ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer"},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
FORCED: Any = {"type": "function", "function": {"name": "get_weather"}}
NAMED: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
CHAT: Any = {"model": MODEL_NAME, "messages": ASK, "temperature": 0}
#: As the files of Qwen3 have them; a guided answer has no thoughts, and is no less the answer.
PARSERS = {"prefill_first": ("--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser", "qwen3")}


@pytest.fixture(scope="module", params=["decode_first", "prefill_first"])
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    more: Any = {"frontend_args": ("--enable-anthropic-api",), "worker_args": PARSERS.get(request.param, ())}
    with served(demo_config(request.param, tmp_path_factory.mktemp("clients") / "run", **more)) as running:
        yield running


def check(text: str | None) -> None:
    asked = json.loads(text or "")
    assert set(asked) == {"city", "unit", "days"}
    assert isinstance(asked["city"], str)
    assert asked["unit"] in ("celsius", "fahrenheit")
    assert isinstance(asked["days"], int)


def chat(deployment: Served, **options: Any) -> Any:
    return deployment.openai.chat.completions.create(**CHAT, max_tokens=200, **options).choices[0]


def events(deployment: Served, path: str, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Of a stream: names and data, without OpenAI's `[DONE]`."""
    found, name = [], ""
    with httpx.stream("POST", f"{deployment.url}{path}", json=body | {"stream": True}, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: {"):
                found.append((name, json.loads(line.removeprefix("data: "))))
    return found


def test_a_schema_is_followed_to_its_end(deployment: Served) -> None:
    choice = chat(deployment, response_format=NAMED)
    assert choice.finish_reason == "stop"
    check(choice.message.content)


@pytest.mark.parametrize("tool_choice", [FORCED, "required"], ids=["named", "required"])
def test_a_forced_tool_is_called_with_its_arguments(deployment: Served, tool_choice: Any) -> None:
    choice = chat(deployment, tools=[TOOL], tool_choice=tool_choice)
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    check(call.function.arguments)
    assert choice.finish_reason == "tool_calls"


def test_a_response_is_the_chats_answer_plain_and_streamed(deployment: Served) -> None:
    body: Any = {"model": MODEL_NAME, "input": ASK[0]["content"], "max_output_tokens": 12, "temperature": 0}
    expected = deployment.openai.chat.completions.create(**CHAT, max_tokens=12)
    plain = deployment.openai.responses.create(**body)
    assert plain.output_text == expected.choices[0].message.content
    assert plain.usage is not None
    assert expected.usage is not None
    assert plain.usage.output_tokens == expected.usage.completion_tokens
    streamed = events(deployment, "/v1/responses", body)
    text = "".join(data["delta"] for name, data in streamed if name == "response.output_text.delta")
    assert text == plain.output_text
    ended = {"stop": "completed", "length": "incomplete"}[expected.choices[0].finish_reason]
    assert (plain.status, streamed[-1][0]) == (ended, f"response.{ended}")


def test_a_message_is_the_chats_answer_plain_and_streamed(deployment: Served) -> None:
    body = CHAT | {"max_tokens": 12}
    expected = deployment.openai.chat.completions.create(**body)
    plain = httpx.post(f"{deployment.url}/v1/messages", json=body, timeout=60).json()
    (part,) = plain["content"]
    assert part["text"] == expected.choices[0].message.content
    reason = {"stop": "end_turn", "length": "max_tokens"}[expected.choices[0].finish_reason]
    assert plain["stop_reason"] == reason
    streamed = events(deployment, "/v1/messages", body)
    deltas = [data["delta"] for name, data in streamed if name == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == part["text"]
    (end,) = (data["delta"]["stop_reason"] for name, data in streamed if name == "message_delta")
    assert (end, streamed[-1][0]) == (reason, "message_stop")
