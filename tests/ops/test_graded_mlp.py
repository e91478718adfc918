"""The perceptron with its gradients by the kernels for Hopper, run on a CPU."""

import cuda_on_cpu
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from quickvit.layers import OcticMlp
from quickvit.ops import hopper, mlp
from quickvit.ops.cuda import panel
from quickvit.testing import randomize

CHANNELS, WIDTH = 1024, 512

pytestmark = pytest.mark.skipif(not cuda_on_cpu.COMPILER, reason="needs a C++ compiler")


@pytest.fixture
def taken(monkeypatch):
    """The path of a Hopper, and the launches of its kernel."""
    calls, launch = [], panel.linear_gelu
    cuda_on_cpu.use(monkeypatch)
    monkeypatch.setattr(
        hopper, "takes_gelu_gradient", lambda x, width: (x.shape[-1], width) == (CHANNELS, WIDTH)
    )
    monkeypatch.setattr(hopper, "are_many", lambda entries: True)
    monkeypatch.setattr(mlp, "fused", lambda x, group: x.dtype != torch.float64)
    monkeypatch.setattr(panel, "linear_gelu", lambda *a, **k: (calls.append(a), launch(*a, **k))[1])
    return calls


def gradients(net, x, grad):
    x = x.clone().requires_grad_()
    y = net(x)
    y.backward(grad.to(y.dtype))
    parameters = getattr(net, "_orig_mod", net).named_parameters()
    return {"y": y, "x": x.grad} | {name: p.grad for name, p in parameters}


@pytest.mark.parametrize("frozen", [(), ("fc1",), ("fc2",), ("fc1", "fc2")])
def test_gradients_are_those_of_the_steps(taken, frozen):
    net = randomize(OcticMlp(CHANNELS, WIDTH)).bfloat16()
    for part in frozen:
        net.get_submodule(part).requires_grad_(False)
    x, grad = (torch.randn(2, 35, CHANNELS).bfloat16() for _ in range(2))
    found = gradients(net, x, grad)
    assert len(taken) == 1
    net.zero_grad()
    exact = gradients(net.double(), x.double(), grad.double())
    assert len(taken) == 1
    for name, value in exact.items():
        if value is None:
            assert found[name] is None
        else:
            assert (found[name] - value).norm() < 0.01 * value.norm(), name


def test_autocast(taken):
    net = randomize(OcticMlp(CHANNELS, WIDTH))
    x, grad = torch.randn(35, CHANNELS), torch.randn(35, CHANNELS)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(net, x, grad)
    assert len(taken) == 1
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())
    net.zero_grad()
    exact = gradients(net.double(), x.double(), grad.double())
    for name, value in exact.items():
        assert (found[name] - value).norm() < 0.02 * value.norm(), name


def test_flops(taken):
    net, x = OcticMlp(CHANNELS, WIDTH).bfloat16(), torch.randn(35, CHANNELS).bfloat16().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        mlp.octic_mlp(x, *net.fc1.weights, net.fc1.bias, *net.fc2.weights).sum().backward()
    assert len(taken) == 1
    assert counter.get_total_flops() == 3 * 2 * 2 * 35 * 12 * WIDTH // 8 * CHANNELS // 8


def test_it_is_for_many_features_as_wide_as_they_were(taken, monkeypatch):
    net, x = OcticMlp(CHANNELS, WIDTH).bfloat16(), torch.randn(3, CHANNELS).bfloat16()
    parameters = *net.fc1.weights, net.fc1.bias, *net.fc2.weights
    assert mlp.takes_mlp(x, net.group, *parameters)
    first_1, first_2, _, second_1, second_2 = parameters
    assert mlp.takes_mlp(x, net.group, first_1, first_2, None, second_1, second_2)
    assert not mlp.takes_mlp(x[:, :512], net.group, *parameters)
    assert not mlp.takes_mlp(x, net.group, *parameters[:3], second_1[:, :32], second_2[:, :64])
    monkeypatch.setattr(hopper, "are_many", lambda entries: entries > 2**20)
    assert not mlp.takes_mlp(x, net.group, *parameters)
    with torch.no_grad():
        assert mlp.takes_mlp(x, net.group, *parameters)


def test_compiled(taken):
    net = randomize(OcticMlp(CHANNELS, WIDTH)).bfloat16()
    x, grad = (torch.randn(2, 35, CHANNELS).bfloat16() for _ in range(2))
    expected = gradients(net, x, grad)
    net.zero_grad()
    found = gradients(torch.compile(net, backend="aot_eager", fullgraph=True), x, grad)
    assert len(taken) == 2
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)
