"""The GIL stays off: which packages are known to turn it on again, and that no other does."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig

import pytest

pytestmark = pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="a build with the GIL")

# Import name: modules that importing it is known to turn the GIL on by (DESIGN: they do not declare themselves).
KNOWN = {
    "fastokens": {"fastokens._native"},
    "torchvision": {"triton"},
    "transformers": {"triton"},
}
IMPORTS = (
    *(
        "av",
        "PIL",
        "fastokens",
        "ft_utils.concurrency",
        "gguf",
        "granian",
        "hf_xet",
        "httpcore",
        "httpx",
        "huggingface_hub",
        "jinja2",
        "llguidance",
    ),
    *("numpy", "prometheus_client", "psutil", "pydantic", "regex", "safetensors", "tokenizers", "torch"),
    *("torchvision", "transformers", "yaml", "zmq"),
)

CODE = """
import importlib, sys, warnings
warnings.simplefilter("error", RuntimeWarning)
try:
    importlib.import_module(sys.argv[1])
except ModuleNotFoundError as exc:
    if exc.name != sys.argv[1].partition(".")[0]:
        raise
    print("missing")
except RuntimeWarning as exc:
    print("enabled by", str(exc).split("'")[1])
else:
    print("gil", sys._is_gil_enabled())
"""


def run_unforced(module: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON_GIL"}
    command = [sys.executable, "-c", CODE, module]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("module", IMPORTS)
def test_only_known_packages_turn_the_gil_on(module: str) -> None:
    said = run_unforced(module)
    if said == "missing":
        pytest.skip(f"{module} is not installed")
    if said.startswith("enabled by"):
        culprit = said.removeprefix("enabled by ")
        assert any(culprit.startswith(name) for name in KNOWN.get(module, ())), said
    else:
        assert said == "gil False"


def test_every_dependency_is_looked_at() -> None:
    """A dependency that nobody imports above could turn the GIL on unseen."""
    names = {"pillow": "PIL", "pyyaml": "yaml", "pyzmq": "zmq"}
    looked_at = {module.partition(".")[0] for module in IMPORTS}
    for requirement in importlib.metadata.requires("ftserve") or []:
        if "extra ==" in requirement:
            continue
        name = re.split(r"[<>=!~;\[ ]", requirement)[0]
        assert names.get(name, name.replace("-", "_")) in looked_at, requirement
