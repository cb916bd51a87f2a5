"""Provide Gated Sparse Attention models for Hugging Face's transformers.

The import of this package registers `model_type` "gsa" with AutoConfig, AutoModel and AutoModelForCausalLM. It also
registers `attn_implementation="gsa"`, which runs the kernels of `gsa_kernels`.
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
