"""What is derived from a parameter is kept in evaluation, and only while it is right."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, stack_module_state, vmap

from quickvit.layers import OcticLift
from quickvit.testing import randomize


@pytest.fixture
def lift():
    return randomize(OcticLift(4, 3, 16)).eval()


def test_unfolded_kernels_are_kept_in_evaluation_only_while_they_are_right(lift):
    assert list(lift.state_dict()) == ["weight", "bias"]
    with torch.no_grad():
        first = lift.kernel()
        assert lift.kernel() is first
        lift.weight.mul_(2)
        torch.testing.assert_close(lift.kernel(), 2 * first)
        lift.load_state_dict({"weight": lift.weight / 2, "bias": lift.bias})
        torch.testing.assert_close(lift.kernel(), first)
        lift.double()
        assert lift.kernel().dtype == torch.float64
    assert lift.kernel().requires_grad
    assert lift.train().kernel().requires_grad


@torch.no_grad()
def test_writes_that_pytorch_does_not_count_are_noticed(lift):
    """As averages of weights are often written: teacher.data.mul_(m).add_(student.data, alpha=1 - m)."""
    first = lift.kernel()
    lift.weight.data.mul_(2)
    torch.testing.assert_close(lift.kernel(), 2 * first)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_to_what_is_kept_last_for_no_other_call(mode, lift):
    with mode():
        first = lift.kernel().clone()
        lift.kernel().zero_()
        torch.testing.assert_close(lift.kernel(), first)


def test_weights_of_inference_mode_are_unfolded_anew():
    """PyTorch does not count who writes to them."""
    with torch.inference_mode():
        lift = randomize(OcticLift(4, 3, 16)).eval()
        first = lift.kernel().clone()
        lift.weight.mul_(2)
        torch.testing.assert_close(lift.kernel(), 2 * first)


@torch.no_grad()
def test_fake_tensors_are_not_kept(lift):
    first = lift.kernel()
    for again in (lift, lift.eval()):
        with FakeTensorMode(allow_non_fake_inputs=True):
            again.kernel()
        torch.testing.assert_close(again.kernel(), first)


def test_functions_that_are_applied_see_the_parameters_themselves(lift):
    """As those do that replace parameters: DTensor's, or casts to other kinds of tensors."""
    seen = []
    lift._apply(lambda tensor: seen.append(tensor) or tensor)
    assert any(tensor is lift.weight for tensor in seen)


def test_steps_of_fused_optimizers_are_noticed(lift):
    optimizer = torch.optim.SGD(lift.parameters(), lr=1.0, fused=True)
    with torch.no_grad():
        first = lift.kernel()
    lift.weight.grad = lift.weight.detach().clone()
    optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(lift.kernel(), 0 * first)


@torch.no_grad()
def test_parametrized_weights_are_unfolded_anew(lift):
    class Scaled(torch.nn.Module):
        factor = 1.0

        def forward(self, weight):
            return self.factor * weight

    scaled = Scaled()
    torch.nn.utils.parametrize.register_parametrization(lift, "weight", scaled)
    first = lift.eval().kernel()
    for factor in range(20):
        scaled.factor = float(factor)
        torch.testing.assert_close(lift.kernel(), factor * first)


@torch.no_grad()
def test_what_is_kept_belongs_to_one_parameter(lift):
    # Without values, as on a GPU, where another parameter may come to lie in the same place.
    lift.to("meta")
    first = lift.kernel()
    assert lift.kernel() is first
    lift.weight = torch.nn.Parameter(torch.empty_like(lift.weight))
    assert lift.kernel() is not first


@torch.no_grad()
def test_calls_in_other_threads_do_not_swap_what_is_kept(lift):
    """Another thread may keep another tensor between looking at the state and taking what belongs to it."""

    class Interrupted:
        def __eq__(self, other):
            if not isinstance(other, Interrupted):
                return False
            lift._derive(lift.weight, lambda: torch.tensor(2.0), "of another thread")
            return True

        __hash__ = None

    # Two keys: one is equal to itself without being asked.
    for key in (Interrupted(), Interrupted()):
        assert lift._derive(lift.weight, lambda: torch.tensor(1.0), key) == 1
    assert lift._kept.tensor == 2


@torch.no_grad()
def test_models_can_be_stacked(lift):
    other = randomize(copy.deepcopy(lift), seed=1).eval()
    parameters, buffers = stack_module_state([lift, other])
    x = torch.randn(1, 3, 8, 8)

    def one(parameters, buffers):
        return functional_call(lift, (parameters, buffers), (x,))

    torch.testing.assert_close(vmap(one)(parameters, buffers), torch.stack([lift(x), other(x)]))
