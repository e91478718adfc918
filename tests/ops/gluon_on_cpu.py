"""A stand-in for Gluon that runs kernels for Hopper on a CPU: Triton's interpreter does not know them.

A kernel's Python runs as it is, each of its groups of warps in a thread. What is asynchronous on the GPU is done at
the moment that is worst for a kernel that forgets to wait: products and stores read shared memory only when they are
waited for, left operands reach registers only when a product needs them, loads write at once or a little later.
"""

import random
import threading
import time
import types
from functools import cached_property
from types import SimpleNamespace

import torch
from triton.experimental.gluon.language import DotOperandLayout
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

PATIENCE = 20


class Barrier:
    """An mbarrier: a phase ends when `count` arrivals and all expected bytes are there."""

    def __init__(self):
        self.changed, self.phase = threading.Condition(), 0
        self.count = self.arrivals = self.bytes = 0

    def init(self, count):
        self.count = self.arrivals = count

    def change(self, arrivals=0, bytes=0):
        with self.changed:
            self.arrivals -= arrivals
            self.bytes += bytes
            assert self.arrivals >= 0, "more arrivals than a phase has"
            if not self.arrivals and not self.bytes:
                self.phase, self.arrivals = self.phase ^ 1, self.count
                self.changed.notify_all()

    def wait(self, phase):
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != phase, PATIENCE), "nobody came to a barrier"


class Memory:
    """Shared memory, which nobody has written to at first."""

    def __init__(self, data):
        self.data, self.dtype, self.layout = data, data.dtype, None

    def index(self, i):
        return Memory(self.data[i])

    def slice(self, start, length):
        return Memory(self.data[start : start + length])

    def permute(self, order):
        return Memory(self.data.permute(order))

    @property
    def shape(self):
        return self.data.shape

    def view(self, dtype, shape, layout):
        """The same bytes in other boxes: with fewer or more rows, or columns beside columns."""
        if self.data.shape[-1] == shape[-1]:
            return Memory(self.data.view(shape))
        boxes, rows, columns = self.data.shape
        pairs = self.data.view(boxes // 2, 2, rows, columns)
        return Memory(pairs.transpose(1, 2).reshape(shape))

    def load(self, layout):
        return Operand(self.data) if isinstance(layout, DotOperandLayout) else self.data.clone()

    def store(self, value):
        self.data.copy_(value)


class Operand:
    """A left operand that is on its way from shared memory to registers until a product needs it."""

    def __init__(self, memory):
        self.memory, self.shape = memory, memory.shape

    @cached_property
    def data(self):
        return self.memory.clone()


class Barriers(list):
    """Barriers in shared memory."""

    index = list.__getitem__

    @property
    def shape(self):
        return len(self), 1


class Pointer:
    """A tensor in global memory, and an offset or several."""

    def __init__(self, tensor, offset=0):
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        self.tensor, self.offset = tensor.detach().as_strided((extent,), (1,)), offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset):
        return Pointer(self.tensor, self.offset + offset)


class Boxes:
    """A tensor descriptor on the side of the kernel."""

    def __init__(self, descriptor):
        self.tensor, self.dtype, self.layout = descriptor.base.detach(), descriptor.base.dtype, None
        self.block_type = SimpleNamespace(shape=descriptor.block_shape)

    def inside(self, corner):
        """The part of a box that lies in the tensor, of the tensor and of the box."""
        sizes = [
            min(size, side - at)
            for at, size, side in zip(corner, self.block_type.shape, self.tensor.shape, strict=True)
        ]
        assert min(sizes) > 0, "a box outside of the tensor"
        there = tuple(slice(at, at + size) for at, size in zip(corner, sizes, strict=True))
        return there, tuple(slice(size) for size in sizes)


class Product:
    """A product that was begun."""

    def __init__(self, a, b, total):
        self.a, self.b, self.total, self.value = a, b, total, None

    def end(self):
        total = self.total.value if isinstance(self.total, Product) else self.total
        product = self.a.data.float() @ self.b.data.float()
        self.value = product if total is None else total + product


class Warps(threading.local):
    """What a group of warps has begun."""

    def __init__(self):
        self.products, self.stores = [], []


def where(condition, one, other):
    """Of values or numbers."""
    return torch.where(*(torch.as_tensor(value) for value in (condition, one, other)))


def multiply_add(a, b, c):
    """a b + c."""
    return a * b + c


class Program:
    """One program of a launch."""

    def __init__(self, number, programs):
        self.warps = Warps()
        self.names = {
            "gl": SimpleNamespace(
                float32=torch.float32,
                bfloat16=torch.bfloat16,
                int64=torch.int64,
                static_range=range,
                program_id=lambda axis: number,
                num_programs=lambda axis: programs,
                zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
                arange=lambda start, end, layout: torch.arange(start, end),
                join=lambda a, b: torch.stack([a, b], dim=-1),
                split=lambda a: a.unbind(dim=-1),
                load=self.load_values,
                store=self.store_values,
                allocate_shared_memory=self.allocate,
                warp_specialize=self.warp_specialize,
                full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
                cast=lambda value, dtype: value,
                convert_layout=lambda value, layout: value,
                where=where,
                maximum=torch.maximum,
                max=torch.amax,
                sum=torch.sum,
                rsqrt=torch.rsqrt,
                exp2=torch.exp2,
                log2=torch.log2,
                max_contiguous=lambda value, count: value,
                multiple_of=lambda value, count: value,
                fma=multiply_add,
                SliceLayout=lambda *_: None,
                BlockedLayout=lambda *_: None,
                SwizzledSharedLayout=lambda *_: None,
                NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: None),
                constexpr=None,
            ),
            "tl": SimpleNamespace(
                fma=multiply_add, where=where, math=SimpleNamespace(exp2=torch.exp2, rsqrt=torch.rsqrt)
            ),
            "_tanh": torch.tanh,
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=lambda barrier, count: barrier.init(count),
                expect=lambda barrier, bytes: barrier.change(1, bytes),
                arrive=lambda barrier, count, pred=True: barrier.change(count if pred else 0),
                wait=lambda barrier, phase: barrier.wait(phase),
            ),
            "tma": SimpleNamespace(store_wait=self.store_wait),
            "fence_async_shared": lambda: None,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_init": lambda value: value,
            "warpgroup_mma_wait": self.wait_for_products,
            "view_as": Memory.view,
            "load_box": self.load,
            "store_box": lambda boxes, corner, memory: self.warps.stores.append((boxes, corner, memory)),
        }
        self.functions = {}

    def python(self, kernel):
        """A kernel, or a function of one, as a function of Python that calls our stand-ins."""
        function = kernel.fn
        if function not in self.functions:
            names = {}
            self.functions[function] = types.FunctionType(function.__code__, names)
            for name, value in function.__globals__.items():
                if isinstance(value, JITFunction | InterpretedFunction):
                    value = self.python(value)
                names[name] = self.names.get(name, getattr(value, "value", value))
        return self.functions[function]

    def allocate(self, dtype, shape, layout):
        if dtype != torch.int64:
            return Memory(torch.full(shape, float("nan"), dtype=dtype))
        return Barrier() if shape == [1] else Barriers(Barrier() for _ in range(shape[0]))

    def load(self, boxes, corner, barrier, memory):
        there, here = boxes.inside(corner)

        def arrive():
            memory.data.zero_()
            memory.data[here] = boxes.tensor[there]
            barrier.change(bytes=-memory.data.nbytes)

        if random.random() < 0.9:
            arrive()
        else:
            threading.Timer(random.random() / 1000, arrive).start()

    def load_values(self, pointer, mask=True, other=0.0):
        offset, mask = torch.broadcast_tensors(pointer.offset, torch.as_tensor(mask))
        return torch.where(mask, pointer.tensor[torch.where(mask, offset, 0)], other)

    def store_values(self, pointer, values, mask):
        values, offset, mask = torch.broadcast_tensors(values, pointer.offset, mask)
        pointer.tensor[offset[mask]] = values[mask]

    def store_wait(self, pending):
        while len(self.warps.stores) > pending:
            boxes, corner, memory = self.warps.stores.pop(0)
            there, here = boxes.inside(corner)
            boxes.tensor[there] = memory.data[here]

    def multiply(self, a, b, total, use_acc=True, is_async=False):
        assert is_async
        product = Product(a, b, total if use_acc else None)
        self.warps.products.append(product)
        return product

    def wait_for_products(self, pending, deps):
        while len(self.warps.products) > pending:
            self.warps.products.pop(0).end()
        # One that goes on can be added to, nothing else.
        values = tuple(v.value if isinstance(v, Product) and v.value is not None else v for v in deps)
        return values if len(values) > 1 else values[0]

    def warp_specialize(self, parts, warps, registers):
        assert len(parts) == len(warps) + 1 == len(registers) + 1
        failures = []

        def run(function, arguments):
            # A little late, so that each is the last at some time.
            time.sleep(random.random() / 1000)
            try:
                function(*arguments)
                assert not self.warps.stores
                assert not self.warps.products
            except Exception as error:  # noqa: BLE001
                failures.append(error)

        threads = [threading.Thread(target=run, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


class OnCpu:
    """In the place of a kernel: its launches are run by the stand-in, one program after the other."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, **constants):
            arguments = [
                Boxes(a) if hasattr(a, "block_shape") else Pointer(a) if isinstance(a, torch.Tensor) else a
                for a in arguments
            ]
            for number in range(grid[0]):
                Program(number, grid[0]).python(self.kernel)(*arguments, **constants)

        return launch
