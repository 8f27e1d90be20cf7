"""Fixtures of the tests with clients' own libraries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.server.serving import RunningServer


@pytest.fixture(scope="session")
def model_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """OpenAI's client of one server with the default model."""
    log = tmp_path_factory.mktemp("model_server") / "log"
    with (
        RunningServer(log, "--torch-threads", "1") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client,
    ):
        yield client
