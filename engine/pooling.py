"""How a model's hidden states become one vector a text, as sentence-transformers says it in files; no torch."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class PoolingKind(enum.Enum):
    LAST = "lasttoken"
    MEAN = "mean"
    CLS = "cls"  # the first token
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Pooling:
    """What is done with the hidden states of a text, [tokens, size]."""

    kind: PoolingKind
    normalize: bool = True  # to length 1
    max_len: int | None = None  # tokens that the model was trained on, where it says so


_FLAGS = {  # in `1_Pooling/config.json`, of which one is set
    "pooling_mode_cls_token": PoolingKind.CLS,
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_max_tokens": PoolingKind.MAX,
    "pooling_mode_lasttoken": PoolingKind.LAST,
}
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def is_generating(architectures: Sequence[str]) -> bool:
    """Whether a model of these architectures continues text; one that does not say is taken for such."""
    return not architectures or any(name.endswith(_GENERATING) for name in architectures)


def read_pooling(path: Path) -> Pooling | None:
    """Return what `modules.json` in a model's directory says; None without one.

    Raises:
        ValueError: it asks for something that is not served. The message is for the operator.
    """
    if not (path / "modules.json").is_file():
        return None
    modules = {str(module["type"]).rpartition(".")[2]: module for module in _read(path / "modules.json")}
    if unknown := modules.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise ValueError(f"{path}: modules.json has a module {min(unknown)}, which is not served")
    kind = PoolingKind.MEAN
    if "Pooling" in modules:
        kind = _kind(path, _read(path / modules["Pooling"]["path"] / "config.json"))
    file = path / "sentence_bert_config.json"
    max_len = _read(file).get("max_seq_length") if file.is_file() else None
    return Pooling(kind, "Normalize" in modules, max_len)


def _kind(path: Path, config: dict[str, Any]) -> PoolingKind:
    chosen = {flag for flag, value in config.items() if flag.startswith("pooling_mode") and value is True}
    named = config.get("pooling_mode")  # newer versions name it
    if isinstance(named, str) and named in {kind.value for kind in PoolingKind}:
        return PoolingKind(named)
    if len(chosen) != 1 or not chosen <= _FLAGS.keys():
        raise ValueError(f"{path}: pooling by {', '.join(sorted(chosen)) or named} is not served")
    return _FLAGS[chosen.pop()]


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as exc:
        raise ValueError(f"{file}: cannot be read as JSON") from exc
