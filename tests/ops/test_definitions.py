"""The operators against their definitions in standard PyTorch, with gradients, compiled, and under autocast."""

import pytest
import torch
from torch.library import opcheck

from quickvit.group import D2, D8, DihedralGroup
from quickvit.ops import octic_gelu, octic_linear, plain

GROUPS = [D2, D8, DihedralGroup(12)]


def weights(group, rows, columns, dtype=torch.float64):
    one = torch.randn(group.num_one_dim, rows, columns, dtype=dtype, requires_grad=True)
    two = torch.randn(group.num_two_dim, 2 * rows, 2 * columns, dtype=dtype, requires_grad=True)
    return one, two, torch.randn(rows, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("shape", [(4,), (2, 3), (0,)])
def test_linear_equals_its_definition(group, shape):
    x = torch.randn(*shape, 2 * group.order, dtype=torch.float64, requires_grad=True)
    parameters = weights(group, 3, 2)
    fused = octic_linear(x, *parameters)
    with plain():
        defined = octic_linear(x, *parameters)
    torch.testing.assert_close(fused, defined)
    grad = torch.randn_like(fused)
    leaves = [t for t in (x, *parameters) if t.numel()]
    for a, b in zip(
        torch.autograd.grad(fused, leaves, grad), torch.autograd.grad(defined, leaves, grad), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_linear_takes_strided_input():
    x = torch.randn(5, 32, dtype=torch.float64)
    parameters = weights(D8, 3, 2)
    expected = octic_linear(x[:, :16].contiguous(), *parameters)
    torch.testing.assert_close(octic_linear(x[:, :16], *parameters), expected)
    columns = x[:, :16].T.contiguous().T
    torch.testing.assert_close(octic_linear(columns, *parameters), expected)


def test_linear_leaves_no_output_unwritten(monkeypatch):
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *a, **k: new_empty(self, *a, **k).fill_(float("nan"))
    )
    y = octic_linear(torch.randn(7, 16, dtype=torch.float64), *weights(D8, 3, 2))
    assert y.isfinite().all()


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 197])
def test_gelu_equals_its_definition(group, tokens):
    x = torch.randn(tokens, 2 * group.order, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)
    fused = octic_gelu(x, bias, group)
    with plain():
        defined = octic_gelu(x, bias, group)
    torch.testing.assert_close(fused, defined)
    grad = torch.randn_like(fused)
    for a, b in zip(
        torch.autograd.grad(fused, (x, bias), grad),
        torch.autograd.grad(defined, (x, bias), grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_gelu_works_in_chunks(monkeypatch):
    from quickvit.ops import gelu

    x = torch.randn(37, 16, dtype=torch.float64)
    whole = octic_gelu(x)
    monkeypatch.setattr(gelu, "_STEP_ELEMENTS", 5 * 16)
    torch.testing.assert_close(octic_gelu(x), whole)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_operators_are_registered_soundly():
    parameters = weights(D8, 3, 2)
    x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    opcheck(torch.ops.quickvit.octic_linear.default, (x, *parameters))
    opcheck(torch.ops.quickvit.octic_linear.default, (x, *parameters[:2], None))
    opcheck(torch.ops.quickvit.octic_gelu.default, (x, torch.randn(2, dtype=torch.float64), 8))


def test_autocast_multiplies_in_half_precision():
    x, parameters = torch.randn(5, 16), weights(D8, 3, 2, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = octic_linear(x, *parameters)
        wide = octic_linear(x.double(), *(p.double() for p in parameters))
    assert y.dtype == torch.bfloat16
    assert wide.dtype == torch.float64
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in parameters)


def test_gelu_overwrites_only_where_no_gradient_needs_its_input():
    x, bias = torch.randn(2, 7, 16), torch.randn(2)
    expected = octic_gelu(x, bias)
    kept = x.clone().requires_grad_()
    y = octic_gelu(kept * 1, bias, overwrite=True)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert kept.grad is not None
    trained = bias.clone().requires_grad_()
    octic_gelu(x.clone(), trained, overwrite=True).sum().backward()
    assert trained.grad is not None
    with torch.no_grad():
        spare = x.clone()
        y = octic_gelu(spare, bias, overwrite=True)
        strided = octic_gelu(x.transpose(0, 1).contiguous().transpose(0, 1), bias, overwrite=True)
    assert y.data_ptr() == spare.data_ptr()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(strided, expected)
