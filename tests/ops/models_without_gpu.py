"""Run Quick ViTs on a kind of GPU that is not there: python models_without_gpu.py 90

All Python of a GPU's path runs, operators and their gradients too, on tensors that have shapes and types but no
values, and say that they are CUDA's. Kernels are not launched, but a launch must have the arguments that its kernel
takes. Prints the kernels that each model launches, as JSON.
"""

import inspect
import json
import sys
from types import SimpleNamespace

import timm
import torch
from timm.utils import reparameterize_model
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from triton.runtime.jit import JITFunction

import quickvit  # noqa: F401
from quickvit.ops import attention, hopper, operator
from quickvit.ops.triton import launch

LAUNCHED = set()


def record(self, *args, grid, **kwargs):
    """In place of a launch."""
    names = inspect.signature(self.fn).parameters
    given = self.signature.bind(*args, **{name: v for name, v in kwargs.items() if name in names}).arguments
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    tensors += [value.base for value in given.values() if hasattr(value, "base")]
    assert tensors, self.__name__
    assert all(isinstance(tensor, FakeTensor) for tensor in tensors), self.__name__
    assert all(isinstance(programs, int) and 0 < programs < 2**31 for programs in grid), (self.__name__, grid)
    LAUNCHED.add(self.__name__.removeprefix("_"))


class Context(SimpleNamespace):
    """What a registered gradient keeps of a call."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors):
        self.real.mark_non_differentiable(*tensors)

    def set_materialize_grads(self, value):
        self.real.set_materialize_grads(value)


class Call(torch.autograd.Function):
    """A function with the gradient that is registered for it."""

    @staticmethod
    def forward(real, operator, spec, *leaves):
        args = tree_unflatten(leaves, spec)
        output = operator.function(*args)
        real.notes = Context(real=real)
        real.operator, real.spec, real.listed = operator, spec, isinstance(output, list)
        operator.registered._setup_context_fn(real.notes, args, output)
        return tuple(output) if real.listed else output

    @staticmethod
    def backward(real, *grads):
        needed = tree_unflatten(real.needs_input_grad[2:], real.spec)
        real.notes.needs_input_grad = needed
        found = real.operator.registered._backward_fn(real.notes, *([[*grads]] if real.listed else grads))
        found = found if isinstance(found, tuple) else (found,)
        assert len(found) == len(needed), real.operator.registered
        leaves = []
        for grad, places in zip(found, needed, strict=True):
            count = len(tree_flatten(places)[0])
            leaves += grad if isinstance(grad, list) else [grad] * count
        return None, None, *leaves


def call(self, *args):
    """In place of an operator of PyTorch, which would ask for its fake implementation: the function itself."""
    leaves, spec = tree_flatten(args)
    graded = torch.is_grad_enabled() and any(getattr(leaf, "requires_grad", False) for leaf in leaves)
    if not graded:
        return self.function(*args)
    assert self.registered._backward_fn is not None, f"{self.registered} has no gradient"
    return Call.apply(self, spec, *leaves)


def pretend(capability):
    """A GPU with this compute capability."""
    shared = {80: 163, 90: 227}[capability] * 1024
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    torch.cuda.is_current_stream_capturing = lambda: True
    # Before the modules that ask for them are imported.
    launch.multiprocessors = lambda device: 132
    launch.shared_memory = lambda device: shared
    hopper._is_exporting = lambda: False
    FakeTensor.is_cuda, FakeTensor.is_cpu = property(lambda self: True), property(lambda self: False)
    FakeTensor.data_ptr = lambda self: self.storage_offset() * self.element_size()
    operator.Operator.__call__, JITFunction.run = call, record
    attention.seen = lambda *tensors: torch.is_grad_enabled()


def new(family, size, patch, mode, fold=False, **options):
    """A model of which only the shapes are known."""
    name = f"quickvit_{family}_{size}_patch{patch}_224"
    model = timm.create_model(name, device="meta", num_classes=10, depth=2, dynamic_img_size=True, **options)
    model = (reparameterize_model(model) if fold else model).to_empty(device="cpu")
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    fake = mode.from_tensor(tensor.detach())
                    tensors[key] = nn.Parameter(fake) if tensors is module._parameters else fake
    return model


def infer(family, size, patch, *, batch=64, dtype=torch.bfloat16, fold=False):
    """A forward pass without gradients."""
    mode = FakeTensorMode()
    model = new(family, size, patch, mode, fold, dtype=dtype).eval()
    with mode, torch.no_grad():
        out = model(torch.empty(batch, 3, 224, 224, dtype=dtype))
        assert out.shape == (batch, 10)
        assert out.dtype == dtype


def train(family, size, patch, *, autocast=True, crops=False, checkpointing=False, **options):
    """A forward and a backward pass."""
    dtype = torch.float32 if autocast else torch.bfloat16
    mode = FakeTensorMode()
    model = new(family, size, patch, mode, dtype=dtype, **options).train()
    model.set_grad_checkpointing(checkpointing)
    with mode:
        # Of tensors of the CPU, which these are to PyTorch.
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if crops:
                sizes = ((64, 224), (256, 7 * patch))
                views = [torch.empty(number, 3, side, side, dtype=dtype) for number, side in sizes]
                total = sum(model.head(x).float().sum() for x in model.forward_crops(views))
            else:
                total = model(torch.empty(64, 3, 224, 224, dtype=dtype)).float().sum()
        total.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, parameter.dtype), name


DROPPED = {"drop_path_rate": 0.3, "drop_path_subset": True}
SIZES = {"tiny": 16, "base": 16, "large": 16, "huge": 14, "giant": 14, "e": 14, "22b": 14}
CASES = {
    **{f"infer {size}": (infer, "d8", size, patch, {}) for size, patch in SIZES.items()},
    **{f"train {size}": (train, "d8", size, patch, {}) for size, patch in SIZES.items()},
    **{f"folded {size}": (infer, "d8", size, patch, {"fold": True}) for size, patch in SIZES.items()},
    "infer i8 huge": (infer, "i8", "huge", 14, {}),
    "train h8 huge": (train, "h8", "huge", 14, {}),
    "infer one image": (infer, "d8", "large", 16, {"batch": 1}),
    "infer one large image": (infer, "d8", "huge", 14, {"batch": 1}),
    "infer float32": (infer, "d8", "base", 16, {"batch": 8, "dtype": torch.float32}),
    "infer float16": (infer, "d8", "huge", 14, {"dtype": torch.float16}),
    "train bfloat16": (train, "d8", "large", 16, {"autocast": False}),
    "train crops": (train, "d8", "large", 16, {"crops": True, **DROPPED}),
    "train large crops": (train, "h8", "huge", 14, {"crops": True, **DROPPED}),
    "train with less memory": (train, "i8", "huge", 14, {"checkpointing": True}),
    "train with dropout": (train, "d8", "large", 16, {"proj_drop_rate": 0.1, "attn_drop_rate": 0.1}),
}


def main(capability):
    pretend(capability)
    found = {}
    for name, (run, family, size, patch, options) in CASES.items():
        LAUNCHED.clear()
        run(family, size, patch, **options)
        found[name] = sorted(LAUNCHED)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
