"""One placeholder in the text becomes one a token, and forged ones are found out."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from ftserve.engine.errors import InvalidRequestError
from ftserve.engine.types import MediaItem, Modality
from ftserve.preprocess.placeholders import expand

IDS = {Modality.IMAGE: 90, Modality.VIDEO: 91}


def item(modality: Modality, num_tokens: int) -> MediaItem:
    patches = np.zeros((0, 0), np.uint8)
    return MediaItem(modality=modality, patches=patches, grid=(1, 1, 1), num_tokens=num_tokens, digest=b"")


def test_placeholders_are_expanded_where_they_stand() -> None:
    items = [item(Modality.IMAGE, 3), item(Modality.VIDEO, 1), item(Modality.IMAGE, 2)]
    ids, spans = expand(array("I", [90, 1, 91, 90, 2]), items, IDS)
    assert ids.tolist() == [90, 90, 90, 1, 91, 90, 90, 2]
    assert [(span.item, span.offset) for span in spans] == list(zip(items, [0, 4, 5], strict=True))


@pytest.mark.parametrize("prompt", [[90, 90], [1], [91]])
def test_other_placeholders_than_items_are_refused(prompt: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="placeholder"):
        expand(array("I", prompt), [item(Modality.IMAGE, 3)], IDS)
