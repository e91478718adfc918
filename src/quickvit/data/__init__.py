"""Data: sources of images, augmentation, and loaders whose batches are functions of seed and step."""

from quickvit.data.images import UNREADABLE, Unreadable, find_images, read_image
from quickvit.data.loader import Batch, EvalLoader, TooManyUnreadable, TrainLoader
from quickvit.data.mixing import Mixing
from quickvit.data.preprocessing import declare_preprocessing, input_size, preprocessing
from quickvit.data.seeds import derived_seed
from quickvit.data.sources import Sample, Source, cache, open_source
from quickvit.data.transforms import (
    DeiT3Transform,
    EvalTransform,
    PixelTransform,
    Transform,
    deit3_transform,
    eval_transform,
)

__all__ = [
    "UNREADABLE",
    "Batch",
    "DeiT3Transform",
    "EvalLoader",
    "EvalTransform",
    "Mixing",
    "PixelTransform",
    "Sample",
    "Source",
    "TooManyUnreadable",
    "TrainLoader",
    "Transform",
    "Unreadable",
    "cache",
    "declare_preprocessing",
    "deit3_transform",
    "derived_seed",
    "eval_transform",
    "find_images",
    "input_size",
    "open_source",
    "preprocessing",
    "read_image",
]
