"""Sound through a whole server: what the model says of it is what transformers says."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import hearing
from tests.preprocess.sites import serving
from tests.preprocess.sounds import F32, coded, tone, wav
from tests.server.serving import NULL_ENGINE, RunningServer

pytest.importorskip("torch")

RATE = hearing.RATE
ENGINE = ("--engine", "torch", "--device", "cpu", "--torch-threads", "1", "--threads", "3")
TEXT = {"type": "text", "text": "What is this?"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hearing.save(tmp_path_factory.mktemp("hearing") / "qwen2-audio")


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--max-num-batched-tokens", "20", "--limit-mm-per-prompt", "audio=3", "--max-media-mb", "1")
    places = ("--allowed-local-media-path", str(directory), "--allowed-media-domains", "127.0.0.1")
    with RunningServer(log, *ENGINE, *options, *places, "--served-model-name", "m", str(directory)) as server:
        yield server
        assert server.is_idle()
        assert server.metric("mm_in_flight") == server.metric("mm_pixels_decoding") == 0
        assert server.stop() == 0
        assert "Traceback" not in server.log()


def part(data: bytes, form: str = "wav", **fields: object) -> dict[str, Any]:
    sound = {"data": base64.b64encode(data).decode(), "format": form}
    return {"type": "input_audio", "input_audio": sound, **fields}


def url_part(url: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def ask(server: RunningServer, *parts: dict[str, Any], **fields: object) -> httpx.Response:
    messages = [{"role": "user", "content": list(parts)}]
    body = {"model": "m", "messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return server.http.post("/v1/chat/completions", json=body | fields)


def answer_of(response: httpx.Response) -> tuple[list[int], str]:
    """Return the prompt's ids and the text."""
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["prompt_token_ids"], answer["choices"][0]["message"]["content"]


def expected(directory: Path, content: list[dict[str, Any]], clips: list[F32]) -> tuple[list[int], str]:
    """Return the ids of the prompt, and what the model says, both by transformers."""
    import torch
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(directory)
    model: Any = AutoModelForMultimodalLM.from_pretrained(directory, dtype=torch.float32).eval()
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=text, audio=clips or None, sampling_rate=RATE, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None)
    length = inputs["input_ids"].shape[1]
    return output[0, :length].tolist(), processor.tokenizer.decode(output[0, length:])


def test_sound_is_heard_as_transformers_hears_it(directory: Path, server: RunningServer) -> None:
    short, long, odd = tone(0.3, seed=1), tone(1.9, seed=2), tone(0.777, hertz=900.0, seed=3)
    for clips in ([short], [long, odd], [odd, long, short], [tone(0.05, seed=4)], []):
        content, shown = [TEXT], [TEXT]
        for clip in clips:
            content += [part(wav(clip, as_float=True)), {"type": "text", "text": " and"}]
            shown += [{"type": "audio", "audio_url": ""}, {"type": "text", "text": " and"}]
        wanted = expected(directory, shown, clips)
        for _ in ("cold", "warm"):
            found = answer_of(ask(server, *content, return_token_ids=True, skip_special_tokens=False))
            assert found == wanted


def test_what_it_hears_decides_what_it_says(server: RunningServer) -> None:
    said = {
        answer_of(ask(server, part(wav(tone(1.0, seed=seed))), TEXT, return_token_ids=True))[1] for seed in range(4)
    }
    assert len(said) > 1


def test_a_clip_may_come_from_anywhere_and_in_any_format(directory: Path, server: RunningServer) -> None:
    data = wav(tone(1.0, seed=1))
    (directory / "tone.wav").write_bytes(data)
    wanted = answer_of(ask(server, part(data, "wav"), return_token_ids=True))
    inline = "data:audio/wav;base64," + base64.b64encode(data).decode()
    with serving({"/tone": lambda site: site.answer(200, data)}) as (root, _):
        for url in (inline, f"file://{directory}/tone.wav", f"{root}/tone"):
            assert answer_of(ask(server, url_part(url), return_token_ids=True)) == wanted
    assert answer_of(ask(server, part(data, "mp3"), return_token_ids=True)) == wanted  # it is what it is
    for codec, form, rate in (("libmp3lame", "mp3", 44100), ("libopus", "ogg", 48000), ("flac", "flac", 8000)):
        ids, _ = answer_of(ask(server, part(coded(tone(1.0, rate), rate, codec, form), form), return_token_ids=True))
        assert abs(len(ids) - len(wanted[0])) <= 2
    outside = ask(server, url_part("file:///etc/passwd"))
    assert (outside.status_code, outside.json()["error"]["param"]) == (400, "messages.0.content.0.audio_url")


def test_the_same_clip_is_decoded_and_encoded_once(server: RunningServer) -> None:
    before = server.metrics()
    body = part(wav(tone(1.5, seed=64)))
    with ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(lambda _: ask(server, body, TEXT, return_token_ids=True, max_tokens=2), range(64))]
    assert len({answer_of(answer)[1] for answer in answers}) == 1
    after = server.metrics()
    assert after["ftserve_mm_decodes_total"] == before["ftserve_mm_decodes_total"] + 1


def test_a_uuid_stands_for_the_data_within_its_tenant(server: RunningServer) -> None:
    bare = {"type": "input_audio", "input_audio": None, "uuid": "the bell"}
    assert ask(server, bare).json()["error"]["code"] == "unknown_uuid"
    sent = answer_of(ask(server, part(wav(tone()), uuid="the bell"), cache_salt="me", return_token_ids=True))
    assert answer_of(ask(server, bare, cache_salt="me", return_token_ids=True)) == sent
    assert ask(server, bare).status_code == 400


@pytest.mark.parametrize(
    ("sent", "status", "param"),
    [
        (part(b""), 400, "input_audio.data"),
        ({"type": "input_audio", "input_audio": "data"}, 400, "input_audio.data"),
        ({"type": "input_audio", "input_audio": {"data": 5, "format": "wav"}}, 400, "input_audio.data"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": 5}}, 400, "input_audio.format"),
        ({"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}}, 400, "input_audio"),
        ({"type": "audio_url", "audio_url": {}}, 400, "audio_url.url"),
        ({"type": "image_url", "image_url": {"url": "data:,a"}}, 400, "type"),
        (part(b"no sound at all"), 422, "input_audio"),
        (part(wav(tone(0.01))), 422, "input_audio"),  # too short for a token
        (part(wav(tone())[:-100]), 422, "input_audio"),
        (part(wav(tone(2.5))), 400, "input_audio"),  # more than the model hears
        (part(bytes(1 << 21)), 400, "input_audio"),  # --max-media-mb
    ],
)
def test_what_cannot_be_heard_is_refused_and_named(
    server: RunningServer, sent: dict[str, Any], status: int, param: str
) -> None:
    answer = ask(server, TEXT, sent)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, f"messages.0.content.1.{param}")


def test_limits_and_forged_placeholders_are_refused(server: RunningServer) -> None:
    clips = [part(wav(tone(0.1, seed=k))) for k in range(4)]
    many = ask(server, *clips)
    assert (many.status_code, many.json()["error"]["param"]) == (400, "messages")
    assert "3 audio" in many.json()["error"]["message"]
    assert ask(server, {"type": "text", "text": "<|AUDIO|>"}, clips[0]).status_code == 400
    assert ask(server, clips[0], mm_processor_kwargs={"rate": 8000}).json()["error"]["param"] == "mm_processor_kwargs"


def test_responses_take_sound_too(server: RunningServer) -> None:
    data = part(wav(tone(0.5)))
    asked = {"model": "m", "max_output_tokens": 4, "input": [{"role": "user", "content": [data]}]}
    assert server.http.post("/v1/responses", json=asked).status_code == 200
    asked["input"] = [{"role": "user", "content": [{"type": "input_audio"}]}]
    assert server.http.post("/v1/responses", json=asked).status_code == 400


def test_sound_crosses_to_the_engine_in_another_process(directory: Path, server: RunningServer, tmp_path: Path) -> None:
    content = (part(wav(tone(0.7, seed=5))), TEXT, part(wav(tone(1.1, seed=6))))
    wanted = answer_of(ask(server, *content, return_token_ids=True))
    with RunningServer(
        tmp_path / "log", *ENGINE, "--front-ends", "1", "--served-model-name", "m", str(directory)
    ) as other:
        assert answer_of(ask(other, *content, return_token_ids=True)) == wanted


@pytest.mark.parametrize("model", ["tiny-vlm", "smollm2-135m-instruct"])
@pytest.mark.parametrize("kind", ["input_audio", "audio_url"])
def test_a_model_that_hears_nothing_says_so(model: str, kind: str, null_servers: Any) -> None:
    sent = part(wav(tone())) if kind == "input_audio" else url_part("data:,a")
    answer = ask(null_servers(model), TEXT, sent)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert kind in error["message"]
    assert error["param"].startswith("messages.0.content.1")


@pytest.fixture(scope="module")
def null_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    running: dict[str, RunningServer] = {}

    def of(model: str) -> RunningServer:
        if model not in running:
            log = tmp_path_factory.mktemp("null") / "log"
            running[model] = RunningServer(log, *NULL_ENGINE, "--served-model-name", "m", model).__enter__()
        return running[model]

    yield of
    for server in running.values():
        server.__exit__(None, None, None)
