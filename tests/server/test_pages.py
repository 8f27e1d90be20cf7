"""What describes the server: openapi.json, the pages, docs/api.md, the dashboard; all true."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ftserve.server import reference
from ftserve.server.openapi import GETS, POSTS, make_openapi
from tests.server.serving import RunningServer, chat_body

DOCS = Path(__file__).parents[2] / "docs"


def test_openapi_json_is_of_the_models(null_server: RunningServer) -> None:
    response = null_server.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    assert response.json() == json.loads(json.dumps(make_openapi()))


def test_references_lead_somewhere() -> None:
    api = make_openapi()
    for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(api)):
        assert name in api["components"]["schemas"]


@pytest.mark.parametrize("path", POSTS)
def test_each_post_of_openapi_is_served(null_server: RunningServer, path: str) -> None:
    assert null_server.http.post(path, content=b"{}", headers={"content-type": "application/json"}).status_code == 400
    assert null_server.get(path).status_code == 405


@pytest.mark.parametrize("path", [path for path in GETS if "{" not in path])
def test_each_get_of_openapi_is_served(null_server: RunningServer, path: str) -> None:
    assert null_server.get(path).status_code == 200
    assert null_server.http.post(path).status_code == 405


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_load_nothing_from_elsewhere(null_server: RunningServer, path: str) -> None:
    response = null_server.get(path)
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert not re.search(r"(src|href)=.?(https?:)?//", response.text)


def test_the_pages_links_are_served(null_server: RunningServer) -> None:
    for link in re.findall(r'href="([^"]+)"', null_server.get("/").text):
        assert null_server.get(f"/{link}").status_code == 200


def test_the_api_reference_is_of_the_models() -> None:
    made = "\n".join(reference.lines()) + "\n"
    assert (DOCS / "api.md").read_text() == made, "run: python -m ftserve.server.reference > docs/api.md"


@pytest.mark.parametrize("field", reference.IGNORED)
def test_what_the_reference_says_is_ignored_is(null_server: RunningServer, field: str) -> None:
    assert null_server.chat(**{field: "x"}).status_code == 200


@pytest.mark.parametrize(("field", "value"), [("suffix", "x"), ("best_of", 3), ("functions", [{}]), ("audio", {})])
def test_what_the_reference_says_is_refused_is(null_server: RunningServer, field: str, value: object) -> None:
    assert field in reference.REFUSED
    assert null_server.http.post("/v1/chat/completions", json=chat_body() | {field: value}).status_code == 400


def test_the_dashboard_asks_for_metrics_that_there_are(null_server: RunningServer) -> None:
    served = {re.match(r"[a-z_0-9]+", name)[0] for name in null_server.metrics()}  # type: ignore[index]
    asked = set(re.findall(r"ftserve_[a-z_0-9]+", (DOCS / "grafana.json").read_text()))
    assert asked
    assert asked <= served
