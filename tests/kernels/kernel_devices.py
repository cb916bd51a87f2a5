"""Chooses where kernel tests run: on a CUDA device if there is one, else on the CPU in Triton's interpreter."""

import pytest
import torch

CUDA = torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
CPU = pytest.param("cpu", marks=pytest.mark.skipif(CUDA, reason="the kernels are compiled for CUDA here"))
GPU = pytest.param("cuda", marks=ON_GPU)
