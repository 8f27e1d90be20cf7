"""Clients that are not OpenAI's Python SDK, each once, as its users call it; each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.serving import MODEL, RunningServer, environment

NPM_OPENAI = "6.49.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ftserve" / "npm" / f"openai-{NPM_OPENAI}"

LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI
from langchain_core.messages import HumanMessage, SystemMessage

model = ChatOpenAI(model=sys.argv[1], base_url=sys.argv[2], api_key="none", max_tokens=20, max_retries=0)
messages = [SystemMessage("Be short."), HumanMessage("Hello")]
whole = model.invoke(messages)
streamed = "".join(chunk.content for chunk in model.stream(messages))
assert whole.content and whole.content == streamed, (whole, streamed)
assert whole.usage_metadata["output_tokens"] == 20, whole.usage_metadata
assert whole.response_metadata["finish_reason"] == "length", whole.response_metadata
both = model.batch([messages, messages])
assert [answer.content for answer in both] == [streamed] * 2
print("done")
"""

LITELLM = """
import sys
import litellm

options = {"model": f"openai/{sys.argv[1]}", "api_base": sys.argv[2], "api_key": "none", "num_retries": 0}
messages = [{"role": "user", "content": "Hello"}]
whole = litellm.completion(messages=messages, max_tokens=20, **options)
chunks = list(litellm.completion(messages=messages, max_tokens=20, stream=True, **options))
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
assert text and whole.choices[0].message.content == text, (whole, text)
assert whole.usage.completion_tokens == 20, whole.usage
try:
    litellm.completion(messages=messages, temperature=1.5, max_tokens=0, **options)
except litellm.BadRequestError as error:
    assert "max_tokens" in str(error), error
else:
    raise AssertionError("max_tokens=0 was taken")
print("done")
"""

INSTRUCTOR = """
import sys
import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)

client = OpenAI(base_url=sys.argv[2], api_key="none", max_retries=0)
answer = '{"name": "Ann", "age": 7}'
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON, instructor.Mode.TOOLS):  # which names its tool
    made = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=sys.argv[1], response_model=Person, max_retries=1,
        messages=[{"role": "user", "content": "Who is it?"}, {"role": "user", "content": f"\u27e6{answer}\u27e7"}],
    )
    assert (made.name, made.age) == ("Ann", 7), (mode, made)
print("done")
"""

JAVASCRIPT = """
import OpenAI from "openai";
import assert from "node:assert";

const [model, baseURL] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];
const whole = await client.chat.completions.create({ model, messages, max_tokens: 20 });
let text = "", usage;
const stream = await client.chat.completions.create(
  { model, messages, max_tokens: 20, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.ok(text);
assert.strictEqual(text, whole.choices[0].message.content);
assert.deepStrictEqual(usage, whole.usage);
const helped = client.chat.completions.stream({ model, messages, max_tokens: 20 });
assert.strictEqual(await helped.finalContent(), text);
const completion = await client.completions.create({ model, prompt: "Once", max_tokens: 5, n: 2 });
assert.strictEqual(completion.choices.length, 2);
assert.deepStrictEqual((await client.models.list()).data.map((one) => one.id), [model]);
await assert.rejects(
  client.chat.completions.create({ model, messages, temperature: 5 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
await assert.rejects(
  client.chat.completions.create({ model: "other", messages }), (error) => error instanceof OpenAI.NotFoundError);
const aborted = await client.chat.completions.create({ model, messages, max_tokens: 5000, stream: true });
for await (const _ of aborted) break;
console.log("done");
"""


JAVASCRIPT_TOOLS = """
import OpenAI from "openai";
import assert from "node:assert";

const [model, baseURL] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const call = '<tool_call>\\n{"name": "get_weather", "arguments": {"city": "Rome"}}\\n</tool_call>';
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const says = (text) => [{ role: "user", content: `\u27e6${text}\u27e7` }];

const runner = client.chat.completions.runTools({
  model, messages: says(call),
  tools: [{ type: "function", function: {
    name: "get_weather", parameters, parse: JSON.parse, function: ({ city }) => `\u27e6It rains in ${city}.\u27e7` } }],
});
assert.strictEqual(await runner.finalContent(), "It rains in Rome.");
const helped = client.chat.completions.stream({
  model, messages: says(call), tools: [{ type: "function", function: { name: "get_weather", parameters } }] });
const [choice] = (await helped.finalChatCompletion()).choices;
assert.strictEqual(choice.finish_reason, "tool_calls");
assert.deepStrictEqual(JSON.parse(choice.message.tool_calls[0].function.arguments), { city: "Rome" });

const tools = [{ type: "function", name: "get_weather", parameters, strict: true }];
const response = await client.responses.create({ model, input: says(call)[0].content, tools });
const made = response.output.find((item) => item.type === "function_call");
assert.deepStrictEqual(JSON.parse(made.arguments), { city: "Rome" });
const types = [];
const thoughtful = says("<think>Hm.</think>Hello there.")[0].content;
const stream = await client.responses.create({ model, input: thoughtful, stream: true });
let text = "";
for await (const event of stream) {
  types.push(event.type);
  if (event.type === "response.output_text.delta") text += event.delta;
}
assert.strictEqual(text, "Hello there.");
assert.strictEqual(types[0], "response.created");
assert.strictEqual(types.at(-1), "response.completed");
const kept = await client.responses.create({ model, input: says("Blue.")[0].content });
assert.strictEqual((await client.responses.retrieve(kept.id)).output_text, "Blue.");
const next = await client.responses.create({
  model, input: says("As I said.")[0].content, previous_response_id: kept.id });
assert.strictEqual(next.output_text, "As I said.");
await client.responses.delete(kept.id);
await assert.rejects(client.responses.retrieve(kept.id), (error) => error instanceof OpenAI.NotFoundError);
console.log("done");
"""


def run(command: list[str], server: RunningServer, *, cwd: Path, model: str = MODEL) -> None:
    """Run a client to its end, which must say that all was as it should be."""
    ended = subprocess.run(
        [*command, model, f"{server.url}/v1"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env=environment({"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "done"


def need(module: str) -> None:
    """Skip a test where a package is not installed."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"no {module} for this Python")


@pytest.mark.parametrize(
    ("module", "script"), [("langchain_openai", LANGCHAIN), ("litellm", LITELLM)], ids=["langchain", "litellm"]
)
def test_a_python_client_gets_what_it_expects(
    null_server: RunningServer, tmp_path: Path, module: str, script: str
) -> None:
    need(module)
    (tmp_path / "client.py").write_text(script)
    run([sys.executable, str(tmp_path / "client.py")], null_server, cwd=tmp_path)


def test_instructor_gets_models(echo_server: RunningServer, tmp_path: Path) -> None:
    need("instructor")
    (tmp_path / "client.py").write_text(INSTRUCTOR)
    run([sys.executable, str(tmp_path / "client.py")], echo_server, cwd=tmp_path)


@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no node here")
def test_the_javascript_sdk_gets_what_it_expects(null_server: RunningServer) -> None:
    run_javascript(JAVASCRIPT, null_server)


@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no node here")
def test_the_javascript_sdk_calls_tools_and_keeps_responses(echo_server: RunningServer) -> None:
    run_javascript(JAVASCRIPT_TOOLS, echo_server)


def run_javascript(script: str, server: RunningServer) -> None:
    """Run a module beside the package, where node looks for it."""
    if not (CACHE / "node_modules" / "openai").is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        (CACHE / "package.json").write_text(json.dumps({"type": "module"}))
        subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--silent", f"openai@{NPM_OPENAI}"],
            cwd=CACHE,
            check=True,
            timeout=120,
        )
    name = f"client-{os.getpid()}.mjs"
    (CACHE / name).write_text(script)
    try:
        run(["node", name], server, cwd=CACHE)
    finally:
        (CACHE / name).unlink()


def test_schemathesis_finds_no_server_error(null_server: RunningServer, tmp_path: Path) -> None:
    """Random requests made of /openapi.json, valid and not; with a bound on time for each."""
    need("schemathesis")
    ended = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"{null_server.url}/openapi.json",
            "--checks=not_a_server_error",
            "--phases=examples,coverage,fuzzing",
            "--max-examples=5",
            "--request-timeout=20",
            "--seed=1",
            "--no-color",
            "--max-time=35",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env=environment(),
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    assert null_server.get("/health").status_code == 200
