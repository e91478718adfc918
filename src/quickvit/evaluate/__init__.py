"""What a model has learned, and whether it keeps its promises."""

from quickvit.evaluate.equivariance import ElementErrors, SymmetryReport, verify_symmetry
from quickvit.evaluate.features import Embedding, embed_images, input_size

__all__ = [
    "ElementErrors",
    "Embedding",
    "SymmetryReport",
    "embed_images",
    "input_size",
    "verify_symmetry",
]
