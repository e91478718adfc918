"""Scores of predictions equal scikit-learn's."""

import pytest
import torch
from sklearn import metrics as oracle

from quickvit.evaluate.metrics import accuracy, balanced_accuracy, confusion_matrix, mean_iou, weighted_f1


@pytest.fixture(params=range(4))
def labels(request):
    """Imbalanced labels; label 5 never occurs, 6 is never predicted, 7 is only predicted."""
    generator = torch.Generator().manual_seed(request.param)
    targets = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.02, 0, 0.03, 0]).multinomial(
        500, True, generator=generator
    )
    noise = torch.tensor([0.2, 0.2, 0.2, 0.1, 0.1, 0, 0, 0.2]).multinomial(500, True, generator=generator)
    keep = (torch.rand(500, generator=generator) < 0.6) & (targets != 6)
    return targets, torch.where(keep, targets, noise)


def test_scores_are_those_of_scikit_learn(labels):
    targets, predictions = labels
    confusion = confusion_matrix(targets, predictions, 9)
    given = targets.numpy(), predictions.numpy()
    assert torch.equal(confusion, torch.tensor(oracle.confusion_matrix(*given, labels=range(9))))
    assert accuracy(confusion) == pytest.approx(oracle.accuracy_score(*given), abs=1e-12)
    f1 = oracle.f1_score(*given, average="weighted")
    assert weighted_f1(confusion) == pytest.approx(f1, abs=1e-12)
    iou = oracle.jaccard_score(*given, average="macro")
    assert mean_iou(confusion) == pytest.approx(iou, abs=1e-12)
    seen = torch.isin(predictions, targets.unique())
    # scikit-learn warns of labels that are predicted and never occur.
    confusion = confusion_matrix(targets[seen], predictions[seen], 9)
    expected = oracle.balanced_accuracy_score(targets[seen].numpy(), predictions[seen].numpy())
    assert balanced_accuracy(confusion) == pytest.approx(expected, abs=1e-12)


def test_confusions_add_up(labels):
    targets, predictions = labels
    parts = [confusion_matrix(t, p, 8) for t, p in zip(targets.split(70), predictions.split(70), strict=True)]
    assert torch.equal(sum(parts), confusion_matrix(targets, predictions, 8))


def test_targets_and_predictions_are_equally_many():
    with pytest.raises(ValueError, match=r"must be of the same shape, got \(3,\) and \(1,\)"):
        confusion_matrix(torch.tensor([0, 1, 2]), torch.tensor([1]), 3)


@pytest.mark.parametrize(("targets", "predictions"), [([0, 3], [0, 1]), ([0, 1], [0, -1])])
def test_labels_out_of_range_are_named(targets, predictions):
    with pytest.raises(ValueError, match=r"must lie between 0 and 2, got"):
        confusion_matrix(torch.tensor(targets), torch.tensor(predictions), 3)
