"""What a model has learned, and whether it keeps its promises."""

from quickvit.evaluate.accuracy import Accuracy, AccuracyReport, measure_accuracy
from quickvit.evaluate.equivariance import ElementErrors, SymmetryReport, verify_symmetry
from quickvit.evaluate.features import Embedding, embed_images
from quickvit.evaluate.rotation import POSES, Pose, cut_circle, rotate

__all__ = [
    "POSES",
    "Accuracy",
    "AccuracyReport",
    "ElementErrors",
    "Embedding",
    "Pose",
    "SymmetryReport",
    "cut_circle",
    "embed_images",
    "measure_accuracy",
    "rotate",
    "verify_symmetry",
]
