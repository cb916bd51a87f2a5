"""Define GSA models for vLLM: the layers of gsa_hf, with the paged caches of vLLM. In shapes, T is the number of tokens
in a step."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import maybe_prefix
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from gsa_hf import GSAConfig
from gsa_hf.attention_gsa import GSARMSNorm, GSARotaryEmbedding
from gsa_hf.modeling_gsa import GSADecoderLayer, rotary_config_of_indexer
from gsa_vllm.attention import Step, attend
from gsa_vllm.pages import PagedCache
from gsa_vllm.parallel import make_parallel


class GSALayer(GSADecoderLayer):
    """A decoder layer of gsa_hf with its paged caches."""

    def __init__(self, vllm_config: VllmConfig, config: GSAConfig, layer_idx: int, prefix: str) -> None:
        super().__init__(config, layer_idx)
        make_parallel(self, config, prefix)
        heads = config.num_key_value_heads // vllm_config.parallel_config.tensor_parallel_size
        name = f"{prefix}.self_attn.keys"
        self.keys = PagedCache(vllm_config, name, FullAttentionSpec, heads, config.head_dim)
        self.indexer_keys = None
        if self.self_attn.indexer is not None:
            name = f"{prefix}.self_attn.indexer_keys"
            self.indexer_keys = PagedCache(vllm_config, name, MLAAttentionSpec, 1, config.index_head_dim)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:  # type: ignore[override]  # one tensor, not three
        """Return [1, T, d] for hidden states [1, T, d]."""
        attended = attend(self.self_attn, self.keys, self.indexer_keys, self.input_layernorm(x), step)
        x = x + self.attention_output_norm(attended)
        return x + self.mlp_output_norm(self.mlp(self.post_attention_layernorm(x)))


class GSAModel(nn.Module):
    def __init__(self, vllm_config: VllmConfig, config: GSAConfig, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            GSALayer(vllm_config, config, layer_idx, f"{prefix}.layers.{layer_idx}")
            for layer_idx in range(config.num_hidden_layers)
        )
        self.norm = GSARMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = GSARotaryEmbedding(config)
        self.indexer_rotary_emb = None
        if config.indexer_rope:
            self.indexer_rotary_emb = GSARotaryEmbedding(rotary_config_of_indexer(config))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states [T, d] for embeddings [T, d] at positions [T]."""
        x = x[None]
        of_indexer = None
        if self.indexer_rotary_emb is not None:
            of_indexer = self.indexer_rotary_emb(x, positions[None])
        step = Step(self.layers[0].keys.metadata(), self.rotary_emb(x, positions[None]), of_indexer)
        for layer in self.layers:
            x = layer(x, step)
        return self.norm(x)[0]


class GSAForCausalLM(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.model = GSAModel(vllm_config, config, maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.model(inputs_embeds, positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load all parameters and saved buffers. vLLM's own loader would ignore the buffer `variance_ema`, and would
        not notice a missing weight of a linear layer."""
        places = self.state_dict(keep_vars=True)
        if self.config.tie_word_embeddings:
            places.pop("lm_head.weight")
        loaded = set()
        for name, weight in weights:
            if name not in places:
                raise ValueError(
                    f"the folder has {name}, which config.json does not describe; export it again"
                )
            getattr(places[name], "weight_loader", default_weight_loader)(places[name], weight)
            loaded.add(name)
        if missing := sorted(places.keys() - loaded):
            raise ValueError(f"the folder lacks {', '.join(missing)}; export it again")
        return loaded
