"""Detokenizing and stop strings: what is streamed does not depend on how tokens are grouped."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ftserve.preprocess.text import StopMatcher, make_detokenizer
from ftserve.preprocess.vocabulary import (
    TokenKind,
    VerbatimVocabulary,
    Vocabulary,
    build_vocabulary,
    byte_level_alphabet,
)


def byte_level_tokenizer() -> Tokenizer:
    """All single bytes, and some longer tokens that cut characters in two."""
    chars = {byte: char for char, byte in byte_level_alphabet().items()}
    vocab = {chars[byte]: byte for byte in range(256)}
    for text in (b"the ", b" answer", b"\xf0\x9f", b"\x99\x82 is", "é".encode(), b"\xc3", b"\n\n"):
        vocab.setdefault("".join(chars[byte] for byte in text), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece style, as in Llama 2."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for text in ("▁the", "▁", "answer", ".", "▁It", "é", "▁▁"):
        vocab[text] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def opaque_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "hel": 1, "##lo": 2, "world": 3, "##s": 4}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


BYTE_LEVEL = build_vocabulary(byte_level_tokenizer())
BYTE_FALLBACK = build_vocabulary(byte_fallback_tokenizer())
OPAQUE = build_vocabulary(opaque_tokenizer())


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(), byte_fallback_tokenizer(), opaque_tokenizer()])
def test_a_verbatim_vocabulary_shows_special_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens(["<|marker|>"])
    usual = build_vocabulary(tokenizer)
    verbatim = VerbatimVocabulary(usual)
    marker = tokenizer.token_to_id("<|marker|>")
    assert marker is not None
    ids = [1, marker, 2]
    assert "<|marker|>" not in detokenize(usual, [ids])
    assert "<|marker|>" in detokenize(verbatim.get(), [ids])
    assert verbatim.get() is verbatim.get()
    assert verbatim.get().kind is usual.kind


def detokenize(vocabulary: Vocabulary, groups: Sequence[Sequence[int]]) -> str:
    detokenizer = make_detokenizer(vocabulary)
    return "".join([detokenizer.push(group) for group in groups]) + detokenizer.flush()


def token_id(vocabulary: Vocabulary, token: str) -> int:
    found: int | None = vocabulary.tokenizer.token_to_id(token)
    assert found is not None
    return found


def grouped(ids: Sequence[int], seed: int) -> list[list[int]]:
    rng, groups, at = random.Random(seed), [], 0
    while at < len(ids):
        size = rng.randint(1, 4)
        groups.append(list(ids[at : at + size]))
        at += size
    return groups


def test_decoders_are_recognized() -> None:
    assert BYTE_LEVEL.kind is TokenKind.BYTE_LEVEL
    assert BYTE_FALLBACK.kind is TokenKind.BYTE_FALLBACK
    assert OPAQUE.kind is TokenKind.OPAQUE


@given(ids=st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=40), seed=st.integers(0, 10**6))
def test_byte_level_text_equals_the_decoders_for_any_tokens_in_any_grouping(ids: list[int], seed: int) -> None:
    assert detokenize(BYTE_LEVEL, grouped(ids, seed)) == BYTE_LEVEL.tokenizer.decode(ids, skip_special_tokens=True)


@given(text=st.text(max_size=30), seed=st.integers(0, 10**6))
def test_byte_level_text_of_valid_utf8_survives(text: str, seed: int) -> None:
    assert detokenize(BYTE_LEVEL, grouped(list(text.encode()), seed)) == text


@given(
    parts=st.lists(st.one_of(st.sampled_from("🙂é漢 a"), st.integers(257, len(BYTE_FALLBACK) - 1)), max_size=20),
    seed=st.integers(0, 10**6),
)
def test_byte_fallback_text_equals_the_decoders(parts: list[str | int], seed: int) -> None:
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else [byte + 1 for byte in part.encode()]
    assert detokenize(BYTE_FALLBACK, grouped(ids, seed)) == BYTE_FALLBACK.tokenizer.decode(
        ids, skip_special_tokens=True
    )


def test_byte_fallback_recovers_from_bytes_that_are_no_text() -> None:  # case 6
    answer = token_id(BYTE_FALLBACK, "answer")
    assert detokenize(BYTE_FALLBACK, [[0xF0 + 1], [0x9F + 1], [answer], [0xFF + 1], [answer]]) == "��answer�answer"


def test_space_after_a_dot_is_kept() -> None:  # case 7
    ids = [token_id(BYTE_FALLBACK, token) for token in ("answer", ".", "▁It")]
    assert detokenize(BYTE_FALLBACK, [[token] for token in ids]) == "answer. It"


@given(ids=st.lists(st.integers(0, 4), max_size=12), seed=st.integers(0, 10**6))
def test_opaque_text_equals_the_decoders(ids: list[int], seed: int) -> None:
    assert detokenize(OPAQUE, grouped(ids, seed)) == OPAQUE.tokenizer.decode(ids, skip_special_tokens=True)


def test_special_tokens_are_no_text_and_other_added_tokens_are() -> None:
    end, tool = (token_id(BYTE_LEVEL, token) for token in ("<|end|>", "<tool>"))
    assert detokenize(BYTE_LEVEL, [[tool], [end]]) == "<tool>"


def test_ids_beyond_the_tokenizer_are_no_text() -> None:  # case 6
    vocabulary = build_vocabulary(byte_level_tokenizer(), size=400)
    assert detokenize(vocabulary, [[399], [ord("a")]]) == "a"


def test_an_incomplete_character_at_the_end_becomes_one_replacement() -> None:
    assert detokenize(BYTE_LEVEL, [[0xF0], [0x9F], [0x99]]) == "�"


def stopped(stops: Sequence[str], pieces: Sequence[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop=include)
    text = "".join([matcher.push(piece) for piece in pieces])
    return text + ("" if matcher.matched else matcher.flush()), matcher.matched


def test_a_stop_string_over_several_tokens_does_not_leak() -> None:  # case 1
    assert stopped(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J"]) == ("ABC", "DEFGHIJ")


def test_a_stop_string_inside_a_token_is_found() -> None:  # case 2
    assert stopped(["DE"], ["DEF"]) == ("", "DE")


def test_the_first_of_two_matches_counts() -> None:  # case 3
    assert stopped(["\n"], ["Answer\n\n"]) == ("Answer", "\n")


@pytest.mark.parametrize("stops", [["a", "is"], ["is", "a"]])
def test_the_order_of_the_list_does_not_matter(stops: list[str]) -> None:  # case 4
    assert stopped(stops, ["This", " is a"]) == ("Th", "is")


def test_ties_go_to_the_earlier_entry() -> None:
    assert stopped(["cd", "bcd"], ["abcd"]) == ("ab", "cd")
    assert stopped(["bcd", "cd"], ["abcd"]) == ("a", "bcd")


def test_held_text_comes_out_when_it_turns_out_harmless() -> None:  # case 5
    assert stopped(["</think>"], ["b,c</thi", "s> d</th"]) == ("b,c</this> d</th", None)


def test_the_stop_string_can_be_kept() -> None:
    assert stopped(["END"], ["the E", "ND."], include=True) == ("the END", "END")


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stops_do_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    ends = [(text.find(stop) + len(stop), k) for k, stop in enumerate(stops) if stop in text]
    if ends:
        end, k = min(ends)
        assert stopped(stops, pieces) == (text[: end - len(stops[k])], stops[k])
    else:
        assert stopped(stops, pieces) == (text, None)
