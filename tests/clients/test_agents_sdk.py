"""The OpenAI Agents SDK runs a tool through both of the APIs that it speaks; outputs are scripted."""

from __future__ import annotations

import asyncio

import pytest
from openai import AsyncOpenAI

from tests.server.serving import MODEL, RunningServer

agents = pytest.importorskip("agents", reason="it is in the environment with the GIL only")

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"⟦It is sunny in {city}.⟧"


@pytest.mark.parametrize("api", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_agent_calls_its_tool_and_answers(echo_server: RunningServer, api: str, is_streamed: bool) -> None:
    async def run() -> object:
        async with AsyncOpenAI(base_url=f"{echo_server.url}/v1", api_key="none", max_retries=0) as client:
            model = getattr(agents, api)(model=MODEL, openai_client=client)
            agent = agents.Agent(
                name="A", instructions="Be brief.", tools=[agents.function_tool(get_weather)], model=model
            )
            if not is_streamed:
                return (await agents.Runner.run(agent, f"⟦{CALL}⟧")).final_output
            result = agents.Runner.run_streamed(agent, f"⟦{CALL}⟧")
            async for _event in result.stream_events():
                pass
            return result.final_output

    agents.set_tracing_disabled(True)
    assert asyncio.run(run()) == "It is sunny in Rome."
