"""Where and to whom the server listens: Unix sockets, TLS, prefixes, web pages of other origins."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.server.serving import COMMAND, NULL_ENGINE, RunningServer, completion_body, environment

Start = Callable[..., RunningServer]


def test_a_unix_socket_takes_the_place_of_a_port(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    command = [*COMMAND, *NULL_ENGINE, "--uds", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(), text=True) as process:
        try:
            assert process.stderr is not None
            assert any(f"at unix:{path} (" in line for line in process.stderr)  # reads up to the start line
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:
                assert client.post("/v1/completions", json=completion_body()).status_code == 200
            second = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False, timeout=60)
            assert second.returncode == 1
            assert "Address already in use" in second.stderr.splitlines()[-1]
        finally:
            process.terminate()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls_is_spoken_where_a_certificate_is_given(start_server: Start, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {key} -out {certificate}"
    subprocess.run([*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    trust = ssl.create_default_context(cafile=str(certificate))
    server = start_server("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), verify=trust)
    assert server.url.startswith("https://")
    assert server.complete().status_code == 200


def test_a_prefix_may_stand_before_every_path(start_server: Start) -> None:
    server = start_server("--root-path", "/llm/", "--api-key", "k")
    assert server.get("/llm/health").status_code == 200
    assert server.get("/llm/v1/models").status_code == 401
    assert server.get("/llm/v1/models", headers={"authorization": "Bearer k"}).status_code == 200


def test_pages_of_allowed_origins_may_call(start_server: Start) -> None:
    server = start_server("--allowed-origins", "https://a.example", "--api-key", "k")
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    preflight = server.http.options("/v1/completions", headers=ask)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    answer = server.get("/health", headers={"origin": "https://a.example"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    stranger = server.get("/health", headers={"origin": "https://b.example"})
    assert "access-control-allow-origin" not in stranger.headers
