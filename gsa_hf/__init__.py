"""Provide Gated Sparse Attention models for Hugging Face's transformers.

Importing this package registers `model_type` "gsa" with AutoConfig, AutoModel and AutoModelForCausalLM. The import also
registers `attn_implementation="gsa"`, which runs the `gsa_kernels` kernels.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_gsa import DENSE_LAYER, INDEXED_LAYER, GSAConfig
from .modeling_gsa import GSAForCausalLM, GSAModel, GSAPreTrainedModel
from .replay import replayed_selections

AutoConfig.register("gsa", GSAConfig)
AutoModel.register(GSAConfig, GSAModel)
AutoModelForCausalLM.register(GSAConfig, GSAForCausalLM)

__all__ = [
    "DENSE_LAYER",
    "INDEXED_LAYER",
    "GSAConfig",
    "GSAForCausalLM",
    "GSAModel",
    "GSAPreTrainedModel",
    "replayed_selections",
]
