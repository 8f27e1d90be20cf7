"""`POST /v1/embeddings` over the built-in embedding model."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.server.serving import RunningServer

MODEL = "all-minilm-l6-v2"
CAT = "A cat sits on the mat."

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("embeddings") / "log", MODEL, "--torch-threads", "1") as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log()


def answer(server: RunningServer, text: object = CAT, **fields: object) -> dict[str, Any]:
    response = server.http.post("/v1/embeddings", json={"model": MODEL, "input": text, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def vectors(server: RunningServer, text: object = CAT, **fields: object) -> NDArray[np.float32]:
    return np.array([item["embedding"] for item in answer(server, text, **fields)["data"]], np.float32)


def refusal(server: RunningServer, path: str = "/v1/embeddings", **fields: object) -> dict[str, Any]:
    response = server.http.post(path, json={"model": MODEL, "input": CAT, **fields})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_the_answer_has_openais_shape(server: RunningServer) -> None:
    found = answer(server, [CAT, "hi"])
    assert (found["object"], found["model"]) == ("list", MODEL)
    assert [(item["object"], item["index"], len(item["embedding"])) for item in found["data"]] == [
        ("embedding", 0, 384),
        ("embedding", 1, 384),
    ]
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 8


def test_what_means_the_same_is_near(server: RunningServer) -> None:
    cat, feline, finance = vectors(server, [CAT, "On the mat there is a feline.", "Interest rates rose by 2 %."])
    assert cat @ feline > 0.6
    assert cat @ finance < 0.2


def test_ids_and_texts_alone_and_together_give_the_same(server: RunningServer) -> None:
    ids = server.http.post("/tokenize", json={"prompt": CAT}).json()["tokens"]
    one = vectors(server)
    for same in (ids, [ids], [CAT]):
        np.testing.assert_allclose(vectors(server, same), one, atol=1e-5)
    np.testing.assert_allclose(vectors(server, ["hi " * 100, CAT])[1:], one, atol=1e-5)


def test_base64_holds_the_same_numbers(server: RunningServer) -> None:
    (item,) = answer(server, encoding_format="base64")["data"]
    decoded = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, vectors(server)[0], atol=1e-6)


def test_fewer_dimensions_are_the_first_ones_at_length_one(server: RunningServer) -> None:
    (full,), (short,) = vectors(server), vectors(server, dimensions=16)
    np.testing.assert_allclose(short, full[:16] / np.linalg.norm(full[:16]), atol=1e-5)


def test_many_inputs_come_in_their_order(server: RunningServer) -> None:
    inputs = [f"{'word ' * (k % 37)}{k}" for k in range(100)]
    found = vectors(server, inputs)
    np.testing.assert_allclose(found[61], vectors(server, inputs[61])[0], atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [30522]}, "input"),
        ({"input": None}, "input"),
        ({"input": "word " * 300}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 385}, "dimensions"),
    ],
)
def test_a_bad_value_is_400_and_named(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    assert refusal(server, **fields)["param"].partition(".")[0] == param


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_it_generates_no_text(server: RunningServer, path: str) -> None:
    assert "/v1/embeddings" in refusal(server, path, prompt="x", messages=[{"role": "user", "content": "x"}])["message"]


def test_a_server_of_text_makes_no_embeddings(null_server: RunningServer) -> None:
    error = refusal(null_server, model="smollm2-135m-instruct")
    assert (error["param"], "--task embed" in error["message"]) == ("model", True)


def test_nothing_is_left_inside(server: RunningServer) -> None:
    assert server.is_idle()
