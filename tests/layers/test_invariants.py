"""Invariants in half precision, and after their memory was given to them late."""

import pytest
import torch
from torch.func import functional_call, grad, vmap

from quickvit.group import D8, DihedralGroup, act_on_features
from quickvit.layers import INVARIANTS, OcticInvariant, invariant
from quickvit.layers.invariant import Canonical, MaxFilter, PowerSpectrum
from quickvit.testing import randomize


@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_power_spectrum_has_the_range_of_its_input(size, dtype):
    torch.manual_seed(0)
    x = (size * torch.randn(50, 64)).to(dtype)
    layer = PowerSpectrum(64)
    exact = layer(x.double())
    error = (layer(x) - exact).norm() / exact.norm()
    assert error < torch.finfo(dtype).eps


def test_small_pairs_keep_their_power():
    x = torch.zeros(1, 8)
    x[0, 4] = 1e-10
    assert PowerSpectrum(8)(x)[0, 4] == pytest.approx(1e-10)


def test_triple_correlations_are_a_basis_of_the_invariant_cubics():
    """As many as Molien's series says: the mean trace of the elements on polynomials of degree three."""
    dimension = 0.0
    for g in D8.elements:
        matrix = D8.isotypic(g)
        one, two, three = (torch.linalg.matrix_power(matrix, k).trace().item() for k in (1, 2, 3))
        dimension += (one**3 + 3 * one * two + 2 * three) / 6 / D8.order
    x = torch.randn(200, 8, dtype=torch.float64)
    values = INVARIANTS["triple_correlation"](8, D8)(x)
    assert torch.linalg.matrix_rank(values / values.norm(dim=0)) == values.shape[1] == round(dimension) == 15


@pytest.mark.parametrize("autocast", [False, True])
def test_a_canonical_pose_does_not_depend_on_rounding(autocast):
    torch.manual_seed(0)
    layer = randomize(Canonical(64))
    x = torch.randn(4000, 64).bfloat16()
    layer = layer if autocast else layer.bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        upright = layer(x)
        for g in layer.layout.group.elements:
            assert (layer(act_on_features(x, g)) - upright).abs().max() < 0.1


@pytest.mark.parametrize("name", INVARIANTS)
def test_weights_are_all_that_is_to_be_loaded(name):
    layer, x = randomize(OcticInvariant(32, name)), torch.randn(3, 32)
    with torch.device("meta"):
        late = OcticInvariant(32, name)
    late.to_empty(device="cpu").load_state_dict(layer.state_dict())
    assert torch.equal(late(x), layer(x))


@pytest.mark.parametrize("name", INVARIANTS)
def test_the_shape_is_known_without_memory(name):
    with torch.device("meta"):
        assert OcticInvariant(32, name)(torch.empty(3, 32)).shape == (3, 32)


@torch.no_grad()
def test_autocast_rounds_templates():
    layer, x = randomize(MaxFilter(64)), torch.randn(50, 64)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, layer.bfloat16()(x.bfloat16()))


@pytest.mark.parametrize("name", ["max_filter", "canonical"])
def test_actions_are_constants_of_compiled_and_exported_models(name):
    layer, x = randomize(OcticInvariant(32, name)).eval(), torch.randn(3, 32)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    expected = layer(x)
    torch.testing.assert_close(torch.compile(layer, backend=backend, fullgraph=True)(x), expected)
    (graph,) = graphs
    # A copy from the host would keep a GPU from running the model by a CUDA graph.
    assert (8, 8, 8) in {
        tuple(t.shape) for t in (*graph.buffers(), *vars(graph).values()) if torch.is_tensor(t)
    }
    for strict in (False, True):
        exported = torch.export.export(layer, (x,), strict=strict).module()
        torch.testing.assert_close(exported(x), expected)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()


def test_actions_are_made_once():
    layer, x = OcticInvariant(48, "canonical", DihedralGroup(24)).double(), torch.randn(3, 48).double()
    layer(x)
    before = invariant._cached_actions.cache_info().misses
    layer(x)
    assert invariant._cached_actions.cache_info().misses == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_canonical_pose_is_the_same_with_gradients(dtype):
    layer, x = randomize(Canonical(64)).to(dtype), torch.randn(50, 64).to(dtype)
    with torch.no_grad():
        expected = layer(x)
    found = layer(x)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", INVARIANTS)
def test_gradients_of_each_sample(name):
    layer, x = randomize(OcticInvariant(32, name)).double(), torch.randn(4, 3, 32).double()
    parameters = {key: value.detach() for key, value in layer.named_parameters()}

    def loss(parameters, sample):
        return functional_call(layer, parameters, (sample,)).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        layer.zero_grad()
        loss(dict(layer.named_parameters()), sample).backward()
        for key, value in layer.named_parameters():
            torch.testing.assert_close(found[key][i], value.grad)
