"""Frozen features of turned and mirrored images: what becomes of the answers, and of the features themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from quickvit.evaluate.backbone import Backbone
from quickvit.evaluate.classification import Classifier
from quickvit.evaluate.extract import Features, image_vector
from quickvit.evaluate.metrics import LABEL_METRICS
from quickvit.evaluate.rotation import Pose
from quickvit.evaluate.segmentation import SegmentationData, Segmenter
from quickvit.group import act_on_grid, act_on_image
from quickvit.testing import equivariance_error, unmoved


@dataclass(frozen=True)
class PoseScores:
    """The score of each answer for images in a pose: accuracy, or mean IoU.

    Of labelled images, not of segmentation, also: all metrics of each answer, and the share of images that were
    labelled as in the first pose.
    """

    pose: Pose
    scores: dict[str, float]
    answers: dict[str, dict[str, float]] | None = None
    same: dict[str, float] | None = None

    def changes(self, first: PoseScores) -> dict[str, float]:
        """How much higher the scores are than those in the first pose."""
        return {name: score - first.scores[name] for name, score in self.scores.items()}


def classify_in_poses(
    classifier: Classifier, load: Callable[[Pose], Features], poses: Sequence[Pose]
) -> list[PoseScores]:
    """Accuracies of a classifier of upright images, for test images in each pose."""
    rows: list[PoseScores] = []
    first: dict[str, Tensor] = {}
    for pose in poses:
        features = load(pose)
        labels = classifier.predict(features)
        first = first or labels
        confusions = {name: features.confusion(found) for name, found in labels.items()}
        answers = {name: {key: f(c) for key, f in LABEL_METRICS.items()} for name, c in confusions.items()}
        scores = {name: found["accuracy"] for name, found in answers.items()}
        same = {name: (found == first[name]).double().mean().item() for name, found in labels.items()}
        rows.append(PoseScores(pose, scores, answers, same))
    return rows


def segment_in_poses(
    segmenter: Segmenter, load: Callable[[Pose], SegmentationData], poses: Sequence[Pose]
) -> list[PoseScores]:
    """Mean IoU of a segmenter of upright images, for test images and masks in each pose."""
    return [
        PoseScores(pose, {name: scores.mean_iou for name, scores in segmenter.evaluate(load(pose)).items()})
        for pose in poses
    ]


def feature_errors(backbone: Backbone, images: Tensor) -> dict[str, dict[str, float]]:
    """How far features are from what the eight rotations and mirrorings should make of them, for each element.

    "vector" should not change at all, "patches" should move with the image and not change otherwise. Errors are
    relative to the spread over the images [B, 3, H, W], B ≥ 2, H = W; 0 is perfect, and unrelated features have √2.
    """

    errors = {
        "vector": equivariance_error(
            lambda x: image_vector(backbone.pooled(x)), images, act_on_image, unmoved
        ),
        "patches": equivariance_error(
            lambda x: backbone.dense(x)["patches"], images, act_on_image, act_on_grid
        ),
    }
    return {name: {str(g): error for g, error in by_element.items()} for name, by_element in errors.items()}
