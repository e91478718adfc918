"""Signs of collapse at both ends of their scales, and what is said about them."""

import math

import pytest
import torch

from quickvit.recipes.dino.watch import agreement, diagnose, feature_std, target_entropy

HEALTHY = {
    "feature_std": 0.7,
    "target_entropy": 0.5,
    "agreement": 0.4,
    "prototype_entropy": 0.9,
    "prototypes_used": 900.0,
}


def test_feature_std():
    generator = torch.Generator().manual_seed(0)
    everywhere = torch.randn(4000, 64, generator=generator)
    assert feature_std(everywhere).item() == pytest.approx(1, abs=0.01)
    assert feature_std(everywhere[:1].expand(10, -1)) == 0
    assert feature_std(3 * everywhere) == pytest.approx(feature_std(everywhere).item())
    assert feature_std(torch.zeros(4, 8)) == 0


def test_target_entropy():
    assert target_entropy(torch.full((3, 8), 1 / 8)).item() == pytest.approx(1)
    assert target_entropy(torch.eye(8)) == 0
    half = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    assert target_entropy(half).item() == pytest.approx(math.log(2) / math.log(4))


def test_agreement_is_that_of_different_views():
    student = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]]])
    # The first image: student prefers 0 and 1, the teacher 1 and 0, so each agrees with the other view.
    targets = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]]])
    assert agreement(student, targets) == 0.75


def test_health_is_not_talked_about():
    assert diagnose(HEALTHY, "softmax") is None


@pytest.mark.parametrize(
    ("change", "centering", "words"),
    [
        ({"prototype_entropy": 0.01}, "none", ("the same prototypes", "nothing centres", "--centering")),
        ({"prototype_entropy": 0.01}, "softmax", ("the same prototypes", "does not keep up", "sinkhorn")),
        ({"target_entropy": 0.9999}, "sinkhorn", ("no preference", "--teacher-temperature")),
        ({"feature_std": 1e-4}, "softmax", ("class tokens", "--learning-rate", "duplicates")),
    ],
)
def test_each_sign_has_a_likely_cause(change, centering, words):
    message = diagnose({**HEALTHY, **change}, centering)
    assert all(word in message for word in words), message
