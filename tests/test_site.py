"""The site builds without a warning, documents every public name and needs nothing from elsewhere."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("group", "layers", "models", "ops", "data", "train", "recipes", "evaluate", "bench")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr
    return folder


@pytest.mark.parametrize("module", ["quickvit", *(f"quickvit.{room}" for room in ROOMS)])
def test_every_public_name_is_documented(site, module):
    room = module.rpartition(".")[2]
    documented = set(re.findall(r'id="([\w.]+)"', (site / "reference" / f"{room}.html").read_text()))
    for name in importlib.import_module(module).__all__:
        # A function with the name of its module is documented there.
        assert {f"{module}.{name}", f"{module}.{name}.{name}"} & documented, name


def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]*)", text)
        loaded += re.findall(r"<link\b[^>]*\bhref=\"([^\"]*)", text)
        assert not [address for address in loaded if "//" in address], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_formulas_are_drawn(site):
    page = (site / "mathematics.html").read_text()
    assert page.count("<math") > 50
    assert "arithmatex" not in page
