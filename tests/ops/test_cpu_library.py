"""The C kernels are built once, found again, rebuilt when damaged, and done without where they cannot be built."""

import logging
import platform
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from quickvit.group import D8
from quickvit.layers import OcticBlock
from quickvit.ops import octic_gelu, plain
from quickvit.ops.backend import fused
from quickvit.ops.cpu import library

_DIGEST = sha256().digest_size
pytestmark = pytest.mark.skipif(not library.available(), reason="there is no C compiler")


@pytest.fixture
def sources(monkeypatch, tmp_path) -> Path:
    """Only the smallest source, so that compiling takes no time; an empty cache; nothing loaded yet."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for path in library.FOLDER.glob("parallel.*"):
        shutil.copy(path, folder)
    monkeypatch.setattr(library, "FOLDER", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library._library.cache_clear()
    yield folder
    library._library.cache_clear()


def built(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "quickvit" / "kernels").glob("*"))


def test_the_library_is_built_once(sources, tmp_path, monkeypatch):
    assert library.available()
    (path,) = built(tmp_path)
    time = path.stat().st_mtime_ns
    library._library.cache_clear()
    # A compiler that fails is not asked again.
    monkeypatch.setattr(subprocess, "run", None)
    assert library.available()
    assert built(tmp_path) == [path]
    assert path.stat().st_mtime_ns == time


@pytest.mark.parametrize(
    "damage", [lambda content: content[:1000], lambda _: b"", lambda c: c[:-40] + b"x" * 40]
)
def test_a_damaged_library_is_rebuilt(sources, tmp_path, damage):
    assert library.available()
    (path,) = built(tmp_path)
    content = path.read_bytes()
    # A new file: the old one is still loaded.
    path.unlink()
    path.write_bytes(damage(content))
    library._library.cache_clear()
    assert library.available()
    assert path.read_bytes()[-_DIGEST:] == sha256(path.read_bytes()[:-_DIGEST]).digest()


@pytest.mark.parametrize("change", ["source", "flags", "processor", "compiler"])
def test_what_the_library_depends_on_is_in_its_name(sources, monkeypatch, change):
    before = library._key(["cc"])
    if change == "source":
        (sources / "parallel.h").write_text((sources / "parallel.h").read_text() + "\n")
    elif change == "flags":
        monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-g"))
    elif change == "processor":
        monkeypatch.setattr(library, "_processor", lambda: "another")
    assert library._key(["gcc"] if change == "compiler" else ["cc"]) != before
    monkeypatch.undo()


def test_a_folder_that_cannot_be_written_is_done_without(sources, tmp_path, caplog):
    (tmp_path / "cache").write_text("not a folder")
    with caplog.at_level(logging.INFO):
        assert library.available()
    assert "the CPU kernels cannot be kept" in caplog.text


@pytest.mark.parametrize(
    "obstacle", ["switch", "no compiler", "no such compiler", "broken source", "no runtime"]
)
def test_without_kernels_the_definition_runs(sources, monkeypatch, caplog, obstacle):
    if obstacle == "switch":
        monkeypatch.setenv(library.SWITCH, "0")
    elif obstacle == "no compiler":
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CC", raising=False)
    elif obstacle == "no such compiler":
        monkeypatch.setenv("CC", "no-such-compiler --fast")
    elif obstacle == "broken source":
        (sources / "parallel.c").write_text("this is no C")
    else:
        monkeypatch.setattr(torch._C, "__file__", str(sources / "parallel.c"))
    x = torch.randn(5, 16)
    with caplog.at_level(logging.INFO):
        assert not fused(x, D8)
    assert "no CPU kernels" in caplog.text
    with plain():
        expected = octic_gelu(x)
    torch.testing.assert_close(octic_gelu(x), expected)


def test_the_compiler_can_be_chosen(sources, monkeypatch, tmp_path):
    """Also one that speaks Latin-1."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    called = tmp_path / "called"
    wrapper = tmp_path / "wrapper"
    words = "printf 'gew\\344hlt\\n' >&2"
    wrapper.write_text(f'#!/bin/sh\ntouch "{called}"\n{words}\nexec "{compiler}" "$@"\n')
    wrapper.chmod(0o700)
    monkeypatch.setenv("CC", f"{wrapper} -O1")
    assert library.available()
    assert called.exists()


def test_the_threads_are_those_of_pytorch():
    code = """
import torch
from quickvit.ops import octic_gelu
torch.set_num_threads(2)
x = torch.randn(512, 512)
before = (x @ x, octic_gelu(x))
import os
count = len(os.listdir("/proc/self/task"))
for _ in range(3):
    x @ x, octic_gelu(x)
assert len(os.listdir("/proc/self/task")) == count
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line or "iomp" in line}
print(len(runtimes))
"""
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "1\n"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are targets of x86-64")
def test_narrower_vectors_give_the_same(monkeypatch, tmp_path):
    targets = ["native", "x86-64"] + ["haswell"] * ("avx2" in library._processor().split())
    block, x = OcticBlock(104, 1, init_values=0.5), torch.randn(2, 37, 104)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = [*library.FLAGS, "-Wall", "-Wextra", "-Werror"]
    results = []
    for target in targets:
        new = tuple(f"-march={target}" if flag == "-march=native" else flag for flag in flags)
        monkeypatch.setattr(library, "FLAGS", new)
        library._library.cache_clear()
        assert library.available()
        block.zero_grad()
        y = block(x)
        y.square().sum().backward()
        with torch.no_grad():
            results.append([y, block(x), *(p.grad.clone() for p in block.parameters())])
    library._library.cache_clear()
    assert len(list(tmp_path.glob("quickvit/kernels/*.so"))) == len(targets)
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("others", ["everybody", "a group", "its owner"])
def test_a_library_that_others_could_have_written_is_not_loaded(
    sources, tmp_path, monkeypatch, caplog, others
):
    assert library.available()
    (path,) = built(tmp_path)
    path.parent.chmod({"everybody": 0o777, "a group": 0o770, "its owner": 0o700}[others])
    if others == "its owner":
        user = path.stat().st_uid + 1
        monkeypatch.setattr(library.os, "geteuid", lambda: user)
    library._library.cache_clear()
    loaded, load = [], library.ctypes.CDLL
    monkeypatch.setattr(library.ctypes, "CDLL", lambda name: loaded.append(name) or load(name))
    with caplog.at_level(logging.INFO):
        assert library.available()
    assert str(path) not in loaded
    assert "others can write" in caplog.text


def test_no_home_is_needed(sources, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert library.available()


def test_a_broken_compiler_command_is_named(sources, monkeypatch, caplog):
    monkeypatch.setenv("CC", 'gcc "x')
    with caplog.at_level(logging.INFO):
        assert not library.available()
    assert 'gcc "x' in caplog.text
