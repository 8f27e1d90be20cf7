"""Imports run server → preprocess → engine.types, and what is light stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {  # folder: the modules of ours that it may import, by prefix
    "engine": ("ftserve.engine",),
    "preprocess": ("ftserve.preprocess", "ftserve.engine.types", "ftserve.engine.errors", "ftserve.engine.sandbox"),
    "server": ("ftserve",),
}
HEAVY = ("torch", "torchvision", "transformers")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield each imported module, and whether it is imported when `path` is."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or "", id(node) in top
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in top


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_point_downwards(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for module, _ in imports(path):
            if module.split(".")[0] in ("engine", "preprocess", "server"):
                pytest.fail(f"{path}: import {module} would load a second copy; write ftserve.{module}")
            if module.split(".")[0] == "ftserve":
                assert module.startswith(ALLOWED[folder]), f"{path} imports {module}"


@pytest.mark.parametrize("folder", ["preprocess", "server"])
def test_no_module_imports_torch_at_its_top(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for module, at_top in imports(path):
            assert not (at_top and module.split(".")[0] in HEAVY), f"{path} imports {module}"


def test_the_front_end_loads_without_torch() -> None:
    code = "import sys, ftserve.server.service; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-X", "gil=0", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
