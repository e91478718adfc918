"""What a model has learned, and whether it keeps its promises."""

from quickvit.evaluate.accuracy import Accuracy, AccuracyReport, measure_accuracy
from quickvit.evaluate.backbone import Backbone
from quickvit.evaluate.classification import (
    Classifier,
    fit_hematology,
    fit_knn,
    fit_linear,
    fit_logistic_grid,
    open_splits,
)
from quickvit.evaluate.equivariance import ElementErrors, SymmetryReport, verify_symmetry
from quickvit.evaluate.extract import Extraction, Features, extract
from quickvit.evaluate.features import Embedding, embed_images
from quickvit.evaluate.knn import Neighbours, nearest
from quickvit.evaluate.poses import PoseScores, classify_in_poses, feature_errors, segment_in_poses
from quickvit.evaluate.predict import Answers, predict_images
from quickvit.evaluate.rotation import POSES, Pose, cut_circle, rotate
from quickvit.evaluate.segmentation import SegmentationScores, Segmenter, fit_segmentation, load_segmentation

__all__ = [
    "POSES",
    "Accuracy",
    "AccuracyReport",
    "Answers",
    "Backbone",
    "Classifier",
    "ElementErrors",
    "Embedding",
    "Extraction",
    "Features",
    "Neighbours",
    "Pose",
    "PoseScores",
    "SegmentationScores",
    "Segmenter",
    "SymmetryReport",
    "classify_in_poses",
    "cut_circle",
    "embed_images",
    "extract",
    "feature_errors",
    "fit_hematology",
    "fit_knn",
    "fit_linear",
    "fit_logistic_grid",
    "fit_segmentation",
    "load_segmentation",
    "measure_accuracy",
    "nearest",
    "open_splits",
    "predict_images",
    "rotate",
    "segment_in_poses",
    "verify_symmetry",
]
