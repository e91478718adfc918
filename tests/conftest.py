"""Settings that hold before any test imports anything."""

import os

import torch

# Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The models of the tests are too small to share between threads.
torch.set_num_threads(1)
