"""The command as operators type it: from anywhere, with mistakes, through the environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.serving import COMMAND, MODEL, NULL_ENGINE, RunningServer, environment

ROOT = Path(__file__).parents[2]
SCRIPT = Path(sys.executable).with_name("ftserve")


def run(*arguments: str, command: tuple[str, ...] = COMMAND, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, which must come soon."""
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=60, env=environment(env), check=False
    )


def error_of(ended: subprocess.CompletedProcess[str], code: int) -> str:
    """Return the line that says what is wrong."""
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    return ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", [(sys.executable, "-m", "ftserve"), (str(SCRIPT),)], ids=["module", "script"])
def test_it_restarts_itself_with_the_gil_off(tmp_path: Path, command: tuple[str, ...]) -> None:
    """From another directory, with arguments that a shell would have split."""
    arguments = (*NULL_ENGINE, "--served-model-name", "a name; with $signs")
    with RunningServer(tmp_path / "log", *arguments, command=command, cwd=tmp_path) as server:
        assert server.log().startswith("ftserve: restarting with -X gil=0\n")
        assert server.get("/v1/models").json()["data"][0]["id"] == "a name; with $signs"
        assert server.metric("gil_enabled") == 0
        assert server.stop() == 0


def test_the_script_imports_nothing_from_where_it_is_started(tmp_path: Path) -> None:
    (tmp_path / "logging.py").write_text("raise SystemExit('wrong logging')")
    with RunningServer(tmp_path / "log", *NULL_ENGINE, command=(str(SCRIPT),), cwd=tmp_path) as server:
        assert server.chat().status_code == 200


@pytest.mark.parametrize("settings", [{"PYTHON_GIL": "0"}, {"PYTHON_GIL": "1"}])
def test_the_gil_is_off_whatever_the_environment_says(tmp_path: Path, settings: dict[str, str]) -> None:
    command = (sys.executable, "-m", "ftserve")
    with RunningServer(tmp_path / "log", *NULL_ENGINE, command=command, env=settings) as server:
        assert ("restarting" in server.log()) == (settings["PYTHON_GIL"] == "1")
        assert server.metric("gil_enabled") == 0


def test_help_names_each_option_and_its_default() -> None:
    ended = run("--help", COLUMNS="200")
    assert ended.returncode == 0
    for option in ("--host", "--port", "--threads", "--max-num-seqs", "--request-timeout", "--engine", "--api-key"):
        assert option in ended.stdout
    assert "(default: 127.0.0.1)" in ended.stdout
    assert MODEL in ended.stdout


BAD_OPTIONS = [
    ("--nonsense",),
    ("--port", "http"),
    ("--port", "65536"),
    ("--port", "-1"),
    ("--threads", "0"),
    ("--threads", "many"),
    ("--http-threads", "-1"),
    ("--max-num-seqs", "0"),
    ("--max-num-seqs", "1.5"),
    ("--max-concurrent-requests", "0"),
    ("--engine", "gas"),
    ("--http-scheduler", "none"),
    ("--dtype", "int7"),
    ("--log-level", "loud"),
    ("--request-timeout", "nan"),
    ("--request-timeout", "-1"),
    ("--stall-timeout", "0"),
    ("--stall-timeout", "1e12"),
    ("--shutdown-timeout", "inf"),
    ("--kv-cache-gb", "nan"),
    ("--null-step-ms", "-5"),
]


@pytest.mark.parametrize("option", BAD_OPTIONS, ids=" ".join)
def test_a_bad_option_exits_with_2_and_is_named(option: tuple[str, ...]) -> None:
    line = error_of(run(*option), 2)
    assert line.startswith("ftserve: error: ")
    assert option[0] in line
    assert option[-1] in line


@pytest.mark.parametrize(
    ("name", "value"),
    [("WEB_CONCURRENCY", "many"), ("WEB_CONCURRENCY", "0"), ("FTSERVE_PORT", "http"), ("FTSERVE_ENGINE", "gas"),
     ("FTSERVE_MAX_NUM_SEQS", "0")],
)  # fmt: skip
def test_a_bad_value_in_the_environment_exits_with_2(name: str, value: str) -> None:
    assert repr(value) in error_of(run(**{name: value}), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/no/such/directory",), "no such directory"),
        ((str(ROOT / "tests"),), "config.json"),
        (("no-such-model",), "neither a built-in name"),
        (("--max-model-len", "100000000"), "--max-model-len"),
        (("--generation-config", "/no/such/file"), "no such generation config"),
        (("--chat-template", str(ROOT / "LICENSE"), "--generation-config", "/no"), "no such generation config"),
        (("--host", "203.0.113.1"), "203.0.113.1"),
        (("--host", "no-such-host.invalid"), "no-such-host"),
    ],
)
def test_what_cannot_be_served_exits_with_1_and_one_line(arguments: tuple[str, ...], words: str) -> None:
    ended = run(*NULL_ENGINE, "--port", "0", *arguments, HF_HUB_OFFLINE="1")
    line = error_of(ended, 1)
    assert line.startswith("ftserve: ")
    assert words in line
    assert len(ended.stderr.splitlines()) == 1


def test_each_option_can_come_from_the_environment(tmp_path: Path) -> None:
    settings = {
        "FTSERVE_ENGINE": "null",
        "FTSERVE_SERVED_MODEL_NAME": "from-the-environment",
        "FTSERVE_MAX_MODEL_LEN": "100",
        "FTSERVE_HTTP_THREADS": "2",
        "WEB_CONCURRENCY": "5",
    }
    with RunningServer(tmp_path / "log", env=settings) as server:
        (model,) = server.get("/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("from-the-environment", 100)
        assert "threads: 2 http, 2 preprocess, 1 output" in server.log()


def test_an_argument_wins_over_the_environment_and_that_over_web_concurrency(tmp_path: Path) -> None:
    settings = {"FTSERVE_THREADS": "4", "WEB_CONCURRENCY": "7", "FTSERVE_SERVED_MODEL_NAME": "other"}
    with RunningServer(tmp_path / "log", "--engine", "null", "--served-model-name", "mine", env=settings) as server:
        assert server.get("/v1/models").json()["data"][0]["id"] == "mine"
        assert "threads: 1 http, 2 preprocess, 1 output" in server.log()


def test_a_file_gives_options_below_the_environment_and_the_arguments(tmp_path: Path) -> None:
    file = tmp_path / "ftserve.yaml"
    file.write_text(
        "engine: null\n"  # YAML's null: as if it were not there
        "served-model-name: from-the-file\nmax_model_len: 100\nthreads: 7\nhttp-threads: 2\nlog-level: warning\n"
        "api_key: [first, second]\nlog-requests: no\nlimit-mm-per-prompt: {image: 2}\n"
    )
    settings = {"FTSERVE_CONFIG": str(file), "FTSERVE_THREADS": "4", "FTSERVE_LOG_REQUESTS": "false"}
    with RunningServer(tmp_path / "log", "--engine", "null", "--max-model-len", "90", env=settings) as server:
        server.http.headers["authorization"] = "Bearer second"
        (model,) = server.get("/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("from-the-file", 90)
        assert "threads: 2 http, 1 preprocess, 1 output" in server.log()  # said although the level is higher
        assert len(server.log().splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot: 1", "no option 'prot'"),
        ("config: x.yaml", "no option 'config'"),
        ("engine: gas", "'gas' is not one of"),
        ("port: http", "'http' is not a number"),
        ("log-requests: perhaps", "neither true nor false"),
        ("- port", "holds no options"),
        ("a: b: c", "is not YAML"),
        (None, "No such file"),
    ],
)
def test_a_bad_file_exits_with_2_and_says_why(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "ftserve.yaml"
    if content is not None:
        file.write_text(content)
    assert words in error_of(run("--config", str(file)), 2)


def test_sampling_defaults_and_the_template_can_be_the_operators(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.25, "top_k": 7}')
    (tmp_path / "template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    given = ("--generation-config", str(tmp_path), "--chat-template", str(tmp_path / "template.jinja"))
    with RunningServer(tmp_path / "log", *NULL_ENGINE, *given) as server:
        assert "temperature 0.25, top_k 7" in server.log()
        messages = {"messages": [{"role": "user", "content": "Hello"}]}
        ids = server.http.post("/tokenize", json=messages).json()["tokens"]
        assert server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "<Hello>"
