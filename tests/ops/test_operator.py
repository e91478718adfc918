"""Operators: who sees a call, and who need not."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from quickvit.ops import backend, linear, operator
from quickvit.ops.operator import closed_operator, is_straight, seen


class Seen(Exception):
    pass


@pytest.fixture
def unseen(monkeypatch):
    """The linear map, whose registered operator complains."""

    def registered(*arguments):
        raise Seen

    monkeypatch.setattr(linear.linear, "registered", registered)
    return linear.octic_linear


def weights(grad=False):
    return torch.ones(4, 3, 2, requires_grad=grad), torch.ones(1, 6, 4, requires_grad=grad)


def test_without_gradients_a_call_goes_straight_to_the_function(unseen):
    expected = linear.definition(torch.ones(5, 16), *weights())
    torch.testing.assert_close(unseen(torch.ones(5, 16), *weights()), expected)
    with torch.no_grad():
        torch.testing.assert_close(unseen(torch.ones(5, 16), *weights(grad=True)), expected)
    with torch.inference_mode():
        torch.testing.assert_close(unseen(torch.ones(5, 16), *weights()), expected)


def test_autograd_sees_it(unseen):
    with pytest.raises(Seen):
        unseen(torch.ones(5, 16), *weights(grad=True))
    with pytest.raises(Seen):
        unseen(torch.ones(5, 16, requires_grad=True), *weights())


def test_counters_see_it(unseen):
    with FlopCounterMode(display=False), pytest.raises(Seen):
        unseen(torch.ones(5, 16), *weights())


def test_subclasses_of_tensors_see_it(unseen):
    class Special(torch.Tensor):
        pass

    with pytest.raises(Seen):
        unseen(torch.ones(5, 16).as_subclass(Special), *weights())
    with FakeTensorMode():
        fake = torch.ones(5, 16)
    with pytest.raises(Seen):
        unseen(fake, *weights())


def test_transforms_have_the_definition(unseen):
    x, parameters = torch.randn(2, 5, 16), weights()
    found = torch.vmap(lambda x: unseen(x, *parameters))(x)
    torch.testing.assert_close(found, torch.stack([linear.definition(part, *parameters) for part in x]))


def test_the_compiler_sees_it():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(linear.octic_linear, backend=backend, fullgraph=True)(torch.ones(5, 16), *weights())
    assert "octic_linear" in graphs[0].code


def test_tensors_in_lists_are_looked_at():
    x = torch.ones(1, requires_grad=True)
    assert seen([torch.ones(1), x])
    assert not seen([torch.ones(1)], None, 3)


def test_a_closed_function_knows_that_it_is():
    told = []

    @closed_operator("told_by_a_test")
    def tell(x: torch.Tensor) -> torch.Tensor:
        told.append(is_straight())
        return x + 1

    tell(torch.ones(1))
    tell.registered(torch.ones(1))
    assert told == [True, True]
    assert not is_straight()

    def fails(x):
        raise Seen

    with pytest.raises(Seen):
        operator.Operator(fails, None)(torch.ones(1))
    assert not is_straight()


def test_autograd_learns_of_what_was_written_to():
    @closed_operator("written_by_a_test", mutates_args=("x",))
    def write(x: torch.Tensor) -> None:
        x.numpy()[:] = 7

    weight = torch.ones(3, requires_grad=True)
    x = torch.ones(3)
    y = (weight * x).sum()
    write(x)
    assert x.tolist() == [7, 7, 7]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        x = torch.ones(3)
        write(x)
    assert x.tolist() == [7, 7, 7]


def test_kernels_are_launched_bare_within_closed_functions(monkeypatch):
    launch = pytest.importorskip("quickvit.ops.triton.launch")

    class Kernel:
        pass

    kernel = Kernel()
    monkeypatch.setattr(launch, "JITFunction", Kernel)
    monkeypatch.setattr(torch.library, "wrap_triton", lambda kernel: ("wrapped", kernel))
    assert launch.traced(kernel) == ("wrapped", kernel)
    monkeypatch.setattr(launch, "is_straight", lambda: True)
    assert launch.traced(kernel) is kernel


@pytest.mark.parametrize(
    ("capability", "hip", "runs"),
    [((7, 5), None, False), ((8, 0), None, True), ((12, 0), None, True), ((0, 0), "6.4", True)],
)
def test_triton_kernels_are_for_gpus_from_ampere_on(monkeypatch, capability, hip, runs):
    backend._is_recent.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(backend, "_HAS_TRITON", True)
    x = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda", 0))
    assert backend._triton_takes(x) == runs
    assert not backend._triton_takes(SimpleNamespace(dtype=torch.float64, device=x.device))
    backend._is_recent.cache_clear()
