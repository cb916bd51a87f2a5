"""Before any kernel is imported: without a CUDA device Triton's kernels run in its interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
