"""Pretrain Gated Sparse Attention language models."""

__version__ = "0.1.0"
