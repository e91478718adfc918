"""Which weights are converted together."""

from types import SimpleNamespace

import pytest
import torch

from quickvit.ops import plain, precision


class Weight(SimpleNamespace):
    """What is asked of a weight on a GPU."""

    device, is_cuda = torch.device("cuda"), True

    def to(self, dtype):
        return "alone"


@pytest.fixture
def compiling(monkeypatch):
    monkeypatch.setattr(precision, "product_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(precision, "_convert", lambda weights, dtype: ["together"] * len(weights))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


def weights(dtypes=(torch.float32, torch.float32), trained=(True, True)):
    return [Weight(dtype=d, requires_grad=t) for d, t in zip(dtypes, trained, strict=True)]


def test_in_compiled_code_they_are(compiling):
    assert precision.autocast_weights(*weights()) == ("together", "together")
    assert precision.autocast_weights(*weights(trained=(False, False))) == ("together", "together")


def test_but_not_a_frozen_one_with_one_that_is_trained(compiling):
    assert precision.autocast_weights(*weights(trained=(True, False))) == ("alone", "alone")


def test_nor_weights_of_other_dtypes(compiling):
    given = weights(dtypes=(torch.float64, torch.float32))
    assert precision.autocast_weights(*given) == (given[0], "alone")


def test_elsewhere_they_are_left_to_the_product(compiling, monkeypatch):
    given = weights()
    with plain():
        assert precision.autocast_weights(*given) == tuple(given)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    assert precision.autocast_weights(*given) == tuple(given)
