"""Tiny random models, and engines over them. torch is imported only by the fixtures that need it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest

from ftserve.engine.grammar import GrammarCompiler
from ftserve.engine.types import GenerationRequest, MediaSpan, SamplingParams, TokenEvent

VOCAB_SIZE = 128


class Tiny:
    """One random model in float32, twice with the same weights: as transformers runs it, and as the engine does."""

    is_asynchronous = False  # of all batchers; see `queueing`

    def __init__(self, config: Any, *, seed: int = 0) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from ftserve.engine import attention, loader

        attention.register()
        torch.manual_seed(seed)
        config.initializer_range = 0.2  # far enough from uniform that greedy choices are no ties
        self.reference = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        ).eval()
        ours = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation="ftserve", dtype=torch.float32
        )
        ours.load_state_dict(self.reference.state_dict())
        self.model = loader.prepare_model(ours, torch.device("cpu"))
        self._greedy: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def greedy(self, prompt_ids: Sequence[int], count: int) -> list[int]:
        """Return what `transformers.generate` says after the prompt."""
        import torch

        key = (tuple(prompt_ids), count)
        if key not in self._greedy:
            ids = torch.tensor([list(prompt_ids)])
            output = self.reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
            self._greedy[key] = output[0, len(prompt_ids) :].tolist()
        return self._greedy[key]

    def batcher(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        max_num_seqs: int = 16,
        chunk: int = 64,
        max_model_len: int = 200,
        use_prefix_cache: bool = True,
        eos_token_ids: Iterable[int] = (),
        kernel: Any = None,
    ) -> Any:
        """Return an engine over the model."""
        import torch

        from ftserve.engine.batcher import ContinuousBatcher
        from ftserve.engine.blocks import BlockPool
        from ftserve.engine.kv_cache import KVCache
        from ftserve.engine.loader import probe_layers
        from ftserve.engine.runner import ModelRunner
        from ftserve.engine.sampler import Sampler
        from ftserve.engine.scheduler import Scheduler

        cpu = torch.device("cpu")
        cache = KVCache(probe_layers(self.model), num_blocks, block_size, dtype=torch.float32, device=cpu)
        return ContinuousBatcher(
            Scheduler(
                BlockPool(num_blocks, block_size),
                max_num_seqs=max_num_seqs,
                max_prefill_tokens=chunk,
                use_prefix_cache=use_prefix_cache,
            ),
            ModelRunner(self.model, cache, max_num_seqs=max_num_seqs, max_model_len=max_model_len, kernel=kernel),
            Sampler(VOCAB_SIZE, cpu),
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            eos_token_ids=frozenset(eos_token_ids),
            is_asynchronous=self.is_asynchronous,
        )


@pytest.fixture(params=[False, True], ids=["read at once", "queued"])
def queueing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Have batchers read a step's tokens at once, and then again only when the next step is queued, as on CUDA."""
    monkeypatch.setattr(Tiny, "is_asynchronous", request.param)
    found: bool = request.param
    return found


@pytest.fixture(scope="session")
def torch() -> ModuleType:
    """The torch module, on one thread: the machine is shared."""
    import torch

    torch.set_num_threads(1)
    return torch


@pytest.fixture(scope="session")
def make_tiny(torch: ModuleType) -> Callable[[Any], Tiny]:
    """Make a tiny model out of a configuration of transformers."""
    return Tiny


@pytest.fixture(scope="session")
def tiny_llama(torch: ModuleType) -> Tiny:
    from transformers import LlamaConfig

    return Tiny(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=256,
        )
    )


@pytest.fixture(scope="session")
def tiny_qwen2(torch: ModuleType) -> Tiny:
    """A model with biases, tied embeddings and as many key heads as query heads."""
    from transformers import Qwen2Config

    return Tiny(
        Qwen2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
    )


@pytest.fixture(scope="session", params=["llama", "qwen2"])
def tiny(request: pytest.FixtureRequest) -> Tiny:
    found: Tiny = request.getfixturevalue(f"tiny_{request.param}")
    return found


@pytest.fixture(scope="session")
def kernel(torch: ModuleType) -> Any:
    """Our CPU kernel, or a skip where there is no compiler."""
    from ftserve.engine import native

    found = native.load_decode_kernel()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


# What the ids of the tiny models mean where a grammar is to be followed: an end, two marks, characters, some pairs.
TINY_EOS, TINY_OPEN, TINY_CLOSE = 0, 1, 2
_PAIRS = (
    '{"',
    '":',
    '",',
    '"}',
    "tr",
    "ue",
    "fa",
    "ls",
    "nu",
    "ll",
    "th",
    "he",
    "in",
    "er",
    "an",
    "on",
    "00",
    "12",
    "[]",
)
TINY_TOKENS = ("<eos>", "<open>", "<close>", *(chr(code) for code in range(0x21, 0x7F)), "Ġ", *_PAIRS)
TINY_TOKENS += tuple(f"<unused{k}>" for k in range(VOCAB_SIZE - len(TINY_TOKENS)))


def tiny_text(token_ids: Iterable[int]) -> str:
    """Return what tokens of the tiny models mean."""
    return "".join("" if token_id <= TINY_CLOSE else TINY_TOKENS[token_id].replace("Ġ", " ") for token_id in token_ids)


@pytest.fixture(scope="session")
def tiny_grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    """A compiler of grammars for the ids of the tiny models."""
    specials = [k for k, token in enumerate(TINY_TOKENS) if token[0] == "<" and len(token) > 1]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [{"id": k, "content": TINY_TOKENS[k]} | flags for k in specials],
                "pre_tokenizer": byte_level,
                "decoder": byte_level,
                "model": {
                    "type": "BPE",
                    "vocab": {token: k for k, token in enumerate(TINY_TOKENS)},
                    "merges": [list(pair) for pair in _PAIRS],
                },
            }
        )
    )
    compiler = GrammarCompiler(path, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({TINY_EOS}))
    yield compiler
    compiler.close()


@pytest.fixture
def make_request() -> Callable[..., GenerationRequest]:
    """Make requests with ids "0", "1", …; keywords are those of `SamplingParams`, greedy by default."""
    made = 0

    def make(
        prompt_ids: Sequence[int],
        max_tokens: int = 8,
        *,
        index: int = 0,
        priority: int = 0,
        cache_salt: bytes = b"",
        media: Sequence[MediaSpan] = (),
        **sampling: Any,
    ) -> GenerationRequest:
        nonlocal made
        made += 1
        return GenerationRequest(
            request_id=str(made - 1),
            index=index,
            prompt_ids=prompt_ids,
            sampling=SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens} | sampling)),
            lane=0,
            route=None,
            priority=priority,
            cache_salt=cache_salt,
            media=tuple(media),
        )

    return make


@pytest.fixture
def drain() -> Callable[..., dict[GenerationRequest, list[TokenEvent]]]:
    """Step until nothing is left, and return each request's events."""

    def run(batcher: Any) -> dict[GenerationRequest, list[TokenEvent]]:
        events: dict[GenerationRequest, list[TokenEvent]] = {}
        while batcher.num_running() or batcher.num_waiting():
            for event in batcher.step():
                events.setdefault(event.request, []).append(event)
        batcher.scheduler.check()
        return events

    return run


@pytest.fixture
def texts(
    drain: Callable[..., dict[GenerationRequest, list[TokenEvent]]],
) -> Callable[..., list[list[int]]]:
    """Add requests, step until nothing is left, and return each one's token ids."""

    def run(batcher: Any, requests: Iterable[GenerationRequest]) -> list[list[int]]:
        requests = list(requests)
        for request in requests:
            batcher.add(request)
        events = drain(batcher)
        return [[token for event in events[request] for token in event.token_ids] for request in requests]

    return run
