"""Nearest neighbours and their votes equal scikit-learn's, however the work is cut into pieces."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from quickvit.evaluate import knn
from quickvit.evaluate.knn import Neighbours, knn_predict, nearest, vote

METRICS = {"cosine": "cosine", "l2": "euclidean"}


@pytest.fixture
def data():
    """Queries, keys and the labels of the keys, of clusters that overlap."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(7, 12, generator=generator, dtype=torch.float64)
    labels = torch.randint(7, (400,), generator=generator)
    keys = centres[labels] + 1.5 * torch.randn(400, 12, generator=generator, dtype=torch.float64)
    truth = torch.randint(7, (90,), generator=generator)
    queries = centres[truth] + 1.5 * torch.randn(90, 12, generator=generator, dtype=torch.float64)
    return queries, keys, labels


@pytest.fixture(params=["whole", "pieces"])
def pieces(request, monkeypatch):
    """The work at once, or in pieces that divide neither queries nor keys, with groups smaller than them."""
    if request.param == "pieces":
        monkeypatch.setattr(knn, "QUERY_BLOCK", 37)
        monkeypatch.setattr(knn, "GROUP", 3)
        monkeypatch.setattr(knn, "KEY_BYTES", 12 * 8 * 101)
        monkeypatch.setattr(knn, "SCORE_BYTES", 4 * 101 * 8)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("k", [1, 5, 20])
def test_neighbours_are_those_of_scikit_learn(data, metric, k):
    queries, keys, labels = data
    model = KNeighborsClassifier(k, metric=METRICS[metric]).fit(keys.numpy(), labels.numpy())
    distances, indices = model.kneighbors(queries.numpy())
    found = nearest(queries, keys, k, metric=metric)
    assert torch.equal(found.indices, torch.tensor(indices))
    expected = 1 - distances if metric == "cosine" else -(distances**2)
    np.testing.assert_allclose(found.scores, expected, atol=1e-9)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("k", [1, 10, 50])
def test_votes_with_a_temperature_are_those_of_scikit_learn(data, k):
    queries, keys, labels = data
    model = KNeighborsClassifier(k, metric="cosine", weights=lambda distances: np.exp((1 - distances) / 0.07))
    model.fit(keys.numpy(), labels.numpy())
    votes = vote(nearest(queries, keys, 50), labels, 7, k, 0.07)
    np.testing.assert_allclose(votes / votes.sum(1, True), model.predict_proba(queries.numpy()), atol=1e-6)
    predicted = knn_predict(queries, keys, labels, 7, (1, 10, 50))[k]
    assert predicted.tolist() == model.predict(queries.numpy()).tolist()


def test_equal_votes_are_those_of_scikit_learn(data):
    queries, keys, labels = data
    model = KNeighborsClassifier(6).fit(keys.numpy(), labels.numpy())
    predicted = knn_predict(queries, keys, labels, 7, (6,), metric="l2", temperature=None)[6]
    assert predicted.tolist() == model.predict(queries.numpy()).tolist()


def test_votes_do_not_overflow():
    neighbours = Neighbours(torch.tensor([[1e4, -1e4]]), torch.tensor([[1, 0]]))
    assert vote(neighbours, torch.tensor([0, 1]), 2, 2, 1e-3).tolist() == [[0, 1]]


@pytest.mark.parametrize("columns", [24, 120, 121, 127, 400])
def test_the_largest_of_groups_are_the_largest_of_all(columns, monkeypatch):
    monkeypatch.setattr(knn, "GROUP", 8)
    scores = torch.randn(50, columns, generator=torch.Generator().manual_seed(columns))
    for k in (1, 3):
        found, expected = knn._best_columns(scores, k), scores.topk(k)
        assert torch.equal(found.scores, expected.values)
        assert torch.equal(found.indices, expected.indices)


@pytest.mark.parametrize("metric", METRICS)
def test_16_bit_features_are_compared_exactly(data, metric):
    queries, keys, _ = (part.bfloat16() if part.is_floating_point() else part for part in data)
    found = nearest(queries, keys, 10, metric=metric)
    assert found.scores.dtype == torch.float32
    expected = nearest(queries.double(), keys.double(), 10, metric=metric)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5, atol=1e-4)
    assert (found.indices == expected.indices).double().mean() > 0.99


def test_rounding_of_float32_features_decides_nothing():
    generator = torch.Generator().manual_seed(0)
    # Nearly parallel vectors, as an untrained model gives them: in float32 their cosines are mostly equal.
    keys = 1 + 1e-3 * torch.randn(500, 64, generator=generator)
    queries = 1 + 1e-3 * torch.randn(100, 64, generator=generator)
    exact = nearest(queries.double(), keys.double(), 20)
    found = nearest(queries, keys, 20)
    assert torch.equal(found.indices, exact.indices)
    again = nearest(queries * (1 + 1e-7), keys, 20)
    assert (again.indices == exact.indices).double().mean() > 0.99
    unit = torch.nn.functional.normalize
    naive = (unit(queries) @ unit(keys).T).topk(20).indices
    assert (naive == exact.indices).double().mean() < 0.9


def test_a_key_of_length_zero_is_far_and_not_nan():
    found = nearest(torch.eye(2), torch.tensor([[0.0, 0.0], [1.0, 1.0]]), 2)
    assert found.indices.tolist() == [[1, 0], [1, 0]]
    assert found.scores.isfinite().all()


def test_memory_is_bounded_by_the_pieces(data, monkeypatch):
    queries, keys, _ = data
    monkeypatch.setattr(knn, "SCORE_BYTES", 8 * 50 * 8)
    monkeypatch.setattr(knn, "KEY_BYTES", 12 * 8 * 64)
    sizes = []
    product = knn._scores
    monkeypatch.setattr(knn, "_scores", lambda q, k, m: sizes.append(len(q) * len(k)) or product(q, k, m))
    nearest(queries, keys, 5)
    assert max(sizes) <= 50 * 8
    assert sum(sizes) == len(queries) * len(keys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k must lie between 1 and the 4 keys, got 0"),
        ({"k": 5}, "k must lie between 1 and the 4 keys, got 5"),
        ({"metric": "l1"}, "metric must be one of cosine, l2, got 'l1'"),
        ({"queries": torch.zeros(2, 4)}, r"rows of equal length, got \(2, 4\) and \(4, 3\)"),
    ],
)
def test_wrong_arguments_name_the_value(change, message):
    given = {"queries": torch.zeros(2, 3), "keys": torch.zeros(4, 3), "k": 1, **change}
    with pytest.raises(ValueError, match=message):
        nearest(**given)


def test_labels_must_fit_the_keys():
    with pytest.raises(ValueError, match="4 keys have 3 labels"):
        knn_predict(torch.zeros(1, 2), torch.zeros(4, 2), torch.zeros(3), 2)
    with pytest.raises(ValueError, match="ks is empty"):
        knn_predict(torch.zeros(1, 2), torch.zeros(4, 2), torch.zeros(4), 2, ())
    for k in (0, -1):
        with pytest.raises(ValueError, match=f"numbers of neighbours must be at least 1, got {k}"):
            knn_predict(torch.zeros(1, 2), torch.zeros(4, 2), torch.zeros(4), 2, (k, 1))
