"""Lists names of settings in Megatron-LM, torchtitan, nanochat and transformers, and names of removed fields.

A config with one of these names is refused. The message names our field, if there is one.
"""

from __future__ import annotations

OTHER_NAMES = {
    "parallel.tensor": "tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size tp",
    "parallel.sequence": "sequence_parallel",
    "parallel.context": "context_parallel_size context_parallel_degree cp",
    "parallel.pipeline": "pipeline_model_parallel_size pipeline_parallel_degree pp",
    "parallel.expert": "expert_model_parallel_size expert_parallel_degree ep",
    "parallel.expert_tensor": "expert_tensor_parallel_size expert_tensor_parallel_degree",
    "parallel.distributed_optimizer": "use_distributed_optimizer",
    "parallel.optimizer_instances": "num_distributed_optimizer_instances",
    "model.num_layers": "num_hidden_layers n_layers n_layer depth",
    "model.hidden_size": "dim d_model n_embd",
    "model.num_heads": "num_attention_heads n_heads n_head",
    "model.num_kv_heads": "num_query_groups num_key_value_heads n_kv_heads n_kv_head",
    "model.head_dim": "kv_channels",
    "model.ffn_hidden_size": "intermediate_size",
    "model.rope_base": "rotary_base rope_theta",
    "model.qk_norm": "qk_layernorm",
    "model.qkv_bias": "add_qkv_bias",
    "model.norm_epsilon": "layernorm_epsilon norm_eps rms_norm_eps",
    "model.init_std": "init_method_std initializer_range",
    "model.tie_embeddings": "tie_word_embeddings",
    "moe.experts": "num_experts",
    "moe.top_k": "moe_router_topk num_experts_per_tok",
    "moe.expert_ffn_hidden_size": "moe_ffn_hidden_size moe_intermediate_size",
    "moe.balance_coeff": "moe_aux_loss_coeff",
    "moe.z_loss_coeff": "moe_z_loss_coeff",
    "gsa.k_base": "index_topk topk",
    "gsa.local_window": "window_size sliding_window",
    "phases.0.steps": "train_iters max_steps num_iterations",
    "phases.0.lr": "learning_rate max_lr",
    "phases.0.warmup_steps": "lr_warmup_iters warmup_iters",
    "phases.0.decay": "lr_decay_style decay_type",
    "train.seq_len_tokens": "seq_length seq_len sequence_length max_seq_len context_length block_size",
    "train.micro_batch_size": "local_batch_size device_batch_size batch_size",
    "train.global_batch_size": "total_batch_size",
    "train.batch_ramp.0.global_batch_size": "rampup_batch_size batch_size_warmup",
    "train.precision": "bf16 dtype mixed_precision_param",
    "train.linear_layers": "linear_precision fp8 fp8_recipe float8",
    "train.weight_average_decay": "ema_decay ema_beta",
    "train.grad_clip": "clip_grad max_norm gradient_clipping",
    "train.adam_epsilon": "adam_eps",
    "train.muon_num_ns_steps": "ns_steps",
    "train.muon_update_rms": "muon_extra_scale_factor",
    "train.recompute": "recompute_granularity activation_checkpointing activation_checkpoint",
    "data.train_dir": "data_path train_data_path dataset_path",
    "data.validation_dir": "valid_data_path",
    "data.tokenizer": "tokenizer_model tokenizer_path vocab_file hf_assets_path",
    "evaluate.every_steps": "eval_interval eval_every",
    "evaluate.max_blocks": "eval_iters",
    "checkpoint.every_steps": "save_interval save_every interval",
    "checkpoint.keep_last": "keep_latest_k",
    "logging.every_steps": "log_interval log_freq",
    "run.name": "wandb_exp_name",
}
"""Maps each field to its names in other frameworks, separated by spaces."""

FIELD_OF = {other: field for field, names in OTHER_NAMES.items() for other in names.split()}
"""Maps names in other frameworks to our fields. A field of `phases` is shown for the first phase."""

REMOVED: dict[str, tuple[object, ...]] = {
    "gsa.selection_query": ("first",),
    "gsa.reuse_teacher": ("leader",),
    "gsa.selection_block": (1,),
    "gsa.indexer_pool": (1,),
    "gsa.key_group_size": (1,),
    "logging.plots": (True, False),
    "evaluate.prompts": ([],),
    "evaluate.prompt_tokens": (32,),
    "monitor.detector": ("robust",),
    "monitor.lower_lr_factor": (0.5,),
    "monitor.lower_lr_steps": (200,),
    "monitor.rewind_min_steps": (100,),
    "monitor.rewind_skip_before_steps": (100,),
    "monitor.rewind_skip_after_steps": (100,),
    "monitor.max_rewinds": (3,),
}
"""Maps each removed field to the values that a config may still have, so that earlier runs and checkpoints load."""
MODEL_SECTIONS = frozenset(["model", "gsa", "moe"])
"""Sections whose fields change the model."""
WHY_REMOVED = "removed; release studies-0.1 or commit 56919bd1 has it"
"""The reason in the error for a removed field with another value."""

SAVED_VALUES = {("monitor.action", "rewind"): "stop", ("monitor.action", "lower_lr"): "skip"}
"""Maps (field, removed value) in a checkpoint's config to a present value. A new config may not have removed values."""
RENAMED_VALUES = {("checkpoint.initial_text", "anew"): "fresh"}
"""Maps (field, earlier value) to the value's present name. The configs of earlier runs have the earlier value."""


def any_value_loads(removed_field: str) -> bool:
    """Return whether a checkpoint may have any value for the removed field: True if the field is not in
    MODEL_SECTIONS."""
    return removed_field.split(".")[0] not in MODEL_SECTIONS


def present_value(field: str, value: str, of_checkpoint: bool) -> str:
    value = RENAMED_VALUES.get((field, value), value)
    return SAVED_VALUES.get((field, value), value) if of_checkpoint else value
