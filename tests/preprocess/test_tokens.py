"""Encoding: fastokens only where it is exact, and no state shared between threads."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from ftserve.engine.checkpoint import Checkpoint, resolve
from ftserve.preprocess.tokens import LONG_TEXT_CHARS, PROBES, fastokens_is_exact, load_tokenizer, make_encoder

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer_json() -> Path:
    return Checkpoint.read(resolve("smollm2-135m-instruct")).tokenizer_json


def random_text(rng: random.Random) -> str:
    alphabet = "abc  \n\t.,;é漢🙂\u0301<|im_end|>0123" + "".join(chr(rng.randrange(32, 0xD7FF)) for _ in range(20))
    return "".join(rng.choice(alphabet) for _ in range(rng.randrange(300)))


def test_fastokens_is_used_for_the_default_model(tokenizer_json: Path) -> None:
    assert fastokens_is_exact(tokenizer_json, load_tokenizer(tokenizer_json))


def test_both_encoders_agree_on_random_text(tokenizer_json: Path) -> None:
    fast, exact = (make_encoder(tokenizer_json, use_fastokens=use) for use in (True, False))
    rng = random.Random(7)
    for _ in range(500):
        text = random_text(rng)
        assert fast(text, False) == exact(text, False), repr(text)


def test_long_texts_take_the_detached_path_with_the_same_ids(tokenizer_json: Path) -> None:
    text = PROBES[0] * (LONG_TEXT_CHARS // len(PROBES[0]) + 1)
    assert (
        make_encoder(tokenizer_json, use_fastokens=False)(text, False).tolist()
        == load_tokenizer(tokenizer_json).encode(text).ids
    )


def test_each_threads_encoder_gives_the_same_ids_under_load(tokenizer_json: Path) -> None:
    texts = [random_text(random.Random(seed)) for seed in range(50)]
    expected = [make_encoder(tokenizer_json, use_fastokens=False)(text, False) for text in texts]
    barrier = threading.Barrier(4)
    wrong: list[str] = []

    def encode_all() -> None:
        encode = make_encoder(tokenizer_json, use_fastokens=True)
        barrier.wait()
        for _ in range(20):
            wrong.extend(text for text, ids in zip(texts, expected, strict=True) if encode(text, False) != ids)

    threads = [threading.Thread(target=encode_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
