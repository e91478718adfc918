"""What is installed: every file that the package reads is in the wheel."""

from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel():
    return {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}


def test_the_wheel_has_every_file_of_the_package(wheel):
    package = {
        path.relative_to(ROOT / "src") for path in (ROOT / "src/quickvit").rglob("*") if path.is_file()
    }
    assert {path.as_posix() for path in package if "__pycache__" not in path.parts} == wheel


@pytest.mark.parametrize(
    "name",
    [
        *("report/page.css", "report/page.js", "report/explorer.css", "report/explorer.html"),
        *("report/explorer.js", "ops/cpu/norm.c", "ops/cpu/gelu.h", "py.typed"),
    ],
)
def test_the_wheel_has_more_than_python(wheel, name):
    assert f"quickvit/{name}" in wheel
