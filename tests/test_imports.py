"""Imports point one way, and the package needs none of its extras."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quickvit

ROOT = Path(quickvit.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# A room may import from its own rank and from lower ones. "" is the package itself, with its public names.
RANKS = {
    "group": 0,
    "ops": 1,
    "layers": 2,
    "models": 3,
    "": 4,
    "provenance": 4,
    "testing": 4,
    "data": 5,
    "train": 6,
    "evaluate": 7,
    "recipes": 8,
    "bench": 9,
    "report": 10,
    "demo": 11,
    "cli": 12,
    "__main__": 13,
}
OPTIONAL = (
    *("matplotlib", "sklearn", "datasets", "tensorboard", "torch.utils.tensorboard", "wandb", "submitit"),
    *("triton", "quickvit.ops.triton"),
)
# Rooms that are imported only where their extra is there, and what they may take for granted.
SPECIAL = {"ops/triton": OPTIONAL, "demo": ("matplotlib", "sklearn"), "report": ("matplotlib", "sklearn")}


def imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run when the module is imported: none inside functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from at_import(node)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def room(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    assert room(path) in RANKS, f"{room(path)} has no rank yet"
    for name in imported(ast.walk(ast.parse(path.read_text()))):
        if not is_within(name, "quickvit"):
            continue
        target = name.split(".")[1] if "." in name else ""
        if target in RANKS:
            assert RANKS[target] <= RANKS[room(path)], f"{room(path)} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_extra_is_imported_with_the_package(path):
    place = path.relative_to(ROOT).with_suffix("").as_posix()
    allowed = next((extras for prefix, extras in SPECIAL.items() if place.startswith(prefix)), ())
    for name in imported(at_import(ast.parse(path.read_text()))):
        extra = next((extra for extra in OPTIONAL if is_within(name, extra)), None)
        assert extra is None or extra in allowed, f"{place} imports {name}"


def test_the_direction_test_sees_lazy_and_nested_imports():
    tree = ast.parse(
        "try:\n    import triton.language\nexcept ImportError:\n    pass\ndef f():\n    import sklearn\n"
    )
    assert list(imported(at_import(tree))) == ["triton.language"]
    assert sorted(imported(ast.walk(tree))) == ["sklearn", "triton.language"]


def test_the_package_works_without_its_extras():
    code = """
import sys
sys.modules.update(dict.fromkeys(("triton", "matplotlib", "sklearn")))  # None makes an import fail
import quickvit, timm, torch
assert timm.list_models("quickvit*")
model = quickvit.QuickVisionTransformer(img_size=32, embed_dim=64, depth=2, num_heads=2, num_classes=3)
print(tuple(model(torch.zeros(2, 3, 32, 32)).shape))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "(2, 3)\n"
