"""Kernels in CUDA run on a CPU: `cuda_on_cpu.h` stands for the hardware, a C++ compiler for NVIDIA's."""

import ctypes
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from quickvit.ops.cuda import library, panel

HERE = Path(__file__).parent
# What a program may have on Hopper.
SHARED = 232448
COMPILER = shutil.which("c++") or shutil.which("g++")

ENTRY = """
extern "C" const char *on_cpu(
    int grid, int threads, int bytes, unsigned seed, const Boxes *boxes, const void *bias, const float *factors,
    u16 *x, u16 *y, int tokens, int blocks, int groups, int each) {
    Maps maps;
    memcpy(&maps, boxes, sizeof maps);
    return run(grid, threads, bytes, seed, [&] {
        panel(maps, bias, factors, x, y, tokens, blocks, groups, each);
    });
}
"""


class Tensor(ctypes.Structure):
    """Boxes of a tensor, as the header has them."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("strides", ctypes.c_longlong * 5),
        ("sizes", ctypes.c_int * 5),
        ("box", ctypes.c_int * 5),
    ]

    def __init__(self, tensor, box):
        # What the driver refuses.
        assert tensor.data_ptr() % 16 == 0
        assert tensor.stride(-1) == 1
        assert not any(stride % 8 for stride in tensor.stride()[:-1])
        missing = 5 - tensor.ndim
        super().__init__(
            tensor.data_ptr(),
            (ctypes.c_longlong * 5)(*missing * [0], *tensor.stride()),
            (ctypes.c_int * 5)(*missing * [1], *tensor.shape),
            (ctypes.c_int * 5)(*missing * [1], *box),
        )


@cache
def compiled(source):
    """A library of a source in which the hardware is the header's."""
    constants = "\n".join(re.findall(r"^#define .*", source, flags=re.M))
    kernel = source.split((library.FOLDER / "hopper.cuh").read_text())[1]
    # Arrays in shared memory have a place of their own.
    kernel = kernel.replace("extern __shared__ __align__(1024) char memory[];", "")
    folder = Path(mkdtemp())
    text = "\n".join([constants, (HERE / "cuda_on_cpu.h").read_text(), kernel, ENTRY])
    (folder / "kernel.cpp").write_text(text)
    command = [COMPILER, "-std=c++17", "-O2", "-w", "-shared", "-fPIC", "kernel.cpp", "-o", "kernel.so"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    loaded = ctypes.CDLL(str(folder / "kernel.so"))
    loaded.on_cpu.restype = ctypes.c_char_p
    return loaded


class OnCpu(library.Kernel):
    """A kernel in the place of one on a GPU."""

    def __init__(self, source, shared, cluster, seed=0):
        super().__init__(ctypes.c_void_p(), 128 * (panel.GROUPS + 1), shared, cluster, 2)
        object.__setattr__(self, "library", compiled(source))
        object.__setattr__(self, "seed", seed)

    def launch(self, clusters, arguments):
        together, *rest = arguments
        tensors = (Tensor * len(together))(*together)
        sizes = clusters * self.cluster, self.threads, self.shared
        trouble = self.library.on_cpu(*sizes, self.seed, tensors, *rest)
        if trouble:
            raise RuntimeError(trouble.decode())


def use(monkeypatch, seed=0, change=None):
    """Let kernels run on a CPU, two clusters of programs, from a source with a change."""

    def changed(source):
        if change:
            assert change[0] in source
            return source.replace(*change)
        return source

    def kernel(device, channels, *options):
        source = changed(panel.source(channels, *options, SHARED))
        return OnCpu(source, panel.shared_bytes(channels, SHARED), panel.CLUSTERS[channels], seed)

    monkeypatch.setattr(panel, "_kernel", kernel)
    monkeypatch.setattr(library, "Boxes", Tensor)
    monkeypatch.setattr(library, "Together", list)
