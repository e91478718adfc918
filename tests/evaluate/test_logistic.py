"""Logistic regression equals scikit-learn's, in pieces or whole."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression as Oracle

from quickvit.evaluate import logistic
from quickvit.evaluate.logistic import fit_logistic, moments


@pytest.fixture(scope="module")
def data():
    """Four imbalanced, overlapping classes far from the origin, with columns of very different size."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0.6, 0.25, 0.1, 0.05]).multinomial(300, True, generator=generator)
    options = {"generator": generator, "dtype": torch.float64}
    features = torch.randn(4, 15, **options)[labels] + 1.5 * torch.randn(300, 15, **options) + 3
    return features * torch.logspace(-1, 1, 15, dtype=torch.float64), labels


@pytest.mark.parametrize("c", [1e-6, 1e-3, 1.0, 30.0])
@pytest.mark.parametrize("rows", [2**16, 70])
def test_the_optimum_is_that_of_scikit_learn(data, c, rows, monkeypatch):
    monkeypatch.setattr(logistic, "ROWS", rows)
    features, labels = data
    fitted = fit_logistic(features, labels, c)
    oracle = Oracle(C=c, tol=1e-10, max_iter=1000, solver="newton-cholesky").fit(features, labels)
    assert fitted.converged
    probabilities = (features @ fitted.weight.T + fitted.bias).softmax(1)
    np.testing.assert_allclose(probabilities, oracle.predict_proba(features), atol=1e-6)
    np.testing.assert_allclose(fitted.weight - fitted.weight.mean(0), oracle.coef_, atol=1e-6)
    assert fitted.predict(features).tolist() == oracle.predict(features).tolist()


@pytest.mark.parametrize("c", [1e-6, 1e-3, 1.0, 30.0])
def test_two_classes_are_scikit_learns_binomial_model(data, c):
    features, labels = data[0], (data[1] > 0).long()
    fitted = fit_logistic(features, labels, c)
    oracle = Oracle(C=c, tol=1e-10, max_iter=1000, solver="newton-cholesky").fit(features, labels)
    assert fitted.converged
    probabilities = (features @ fitted.weight.T + fitted.bias).softmax(1)
    np.testing.assert_allclose(probabilities, oracle.predict_proba(features), atol=1e-6)
    np.testing.assert_allclose(fitted.weight[1] - fitted.weight[0], oracle.coef_[0], atol=1e-6)


def test_short_types_are_fitted_in_float32(data):
    features, labels = data
    exact = fit_logistic(features.bfloat16().double(), labels)
    fitted = fit_logistic(features.bfloat16(), labels)
    assert fitted.weight.dtype == torch.float32
    np.testing.assert_allclose(fitted.weight, exact.weight, atol=1e-3)
    assert (fitted.predict(features.bfloat16()) == exact.predict(features)).double().mean() > 0.99


def test_a_fit_that_was_cut_short_says_so(data):
    fitted = fit_logistic(*data, 1e4, max_iterations=3)
    assert not fitted.converged
    assert fitted.iterations == 3


def test_a_constant_column_and_a_single_class_do_no_harm():
    features = torch.cat([torch.ones(6, 1), torch.arange(6.0)[:, None]], 1)
    halves = torch.tensor([0, 0, 0, 1, 1, 1])
    assert fit_logistic(features, halves).predict(features).tolist() == halves.tolist()
    assert fit_logistic(features, torch.full((6,), 4)).predict(features).tolist() == [4] * 6


def test_labels_need_not_be_consecutive(data):
    features, labels = data
    names = torch.tensor([3, 7, 200, 11])
    fitted = fit_logistic(features, names[labels])
    assert fitted.converged
    assert fitted.labels.tolist() == [3, 7, 11, 200]
    assert torch.equal(fitted.predict(features), names[fit_logistic(features, labels).predict(features)])


def test_moments():
    x = 5 + torch.randn(50, 3)
    mean, variance = moments(x.split(7))
    torch.testing.assert_close(mean, x.double().mean(0))
    torch.testing.assert_close(variance, x.double().var(0, correction=0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(2)}, "3 rows of features have 2 labels"),
        ({"c": 0.0}, "c must be positive, got 0.0"),
        ({"max_iterations": 0}, "max_iterations must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_name_the_value(change, message):
    given = {"features": torch.zeros(3, 2), "labels": torch.zeros(3), **change}
    with pytest.raises(ValueError, match=message):
        fit_logistic(**given)
