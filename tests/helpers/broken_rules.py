"""Lists every check that involves several config fields, a row for each: `override ; override -> fragment | fragment`.
The overrides violate the check, and the error must contain the fragments. Indented lines continue the row above."""

from os.path import expanduser

SHORT = {
    "YARN": [
        "model.rope_scaling.rope_type=yarn",
        "model.rope_scaling.factor=4",
        "model.rope_scaling.original_max_position_embeddings=64",
    ],
    "EXPERTS": ["moe.experts=8", "moe.top_k=2", "moe.expert_ffn_hidden_size=64"],
}

BROKEN_RULES = r"""
model.num_layers=100000000000 -> model.num_layers = 100000000000 | give at most 10000
moe.experts=100000000000 -> moe.experts = 100000000000 | give at most 65536
train.seq_len_tokens=2147483648 -> train.seq_len_tokens = 2147483648 | give at most 1000000000
model.num_kv_heads=3 -> model.num_heads = 4 | not a multiple of model.num_kv_heads = 3 | set | 3 or 6
parallel.tensor=8 -> model.num_heads = 4 | parallel.tensor = 8 | to 8
profile.start_step=21 -> profile.start_step = 21 | the last step of the run, 20
profile.start_step=19 -> profile.steps = 3 | profile.start_step = 19 | 2 or less
profile.ranks=[1, 1] -> profile.ranks.1 = 1 | named twice
profile.ranks=[0, 8] -> profile.ranks.1 = 8 | no rank of this run, which has 8 | from 0 to 7
profile.memory_snapshot=true -> profile.memory_snapshot = true | profile.start_step = 0
model.num_kv_heads=1 ; parallel.tensor=2 -> model.num_kv_heads = 1 | parallel.tensor = 2
model.ffn_hidden_size=129 ; parallel.tensor=2 -> model.ffn_hidden_size = 129 | 128 or 130
model.vocab_size=513 ; parallel.tensor=2 -> model.vocab_size = 513 | 512 or 514
train.seq_len_tokens=257 ; parallel.tensor=2 -> train.seq_len_tokens = 257 | parallel.tensor = 2
model.num_layers=9 ; parallel.pipeline=2 -> model.num_layers = 9 | parallel.pipeline = 2 | 8 or 10
parallel.grad_reduce_dtype=bf16 ; train.precision=fp32 ->
    parallel.grad_reduce_dtype = bf16 | train.precision = fp32 | set it to fp32
train.linear_layers=fp8 ; train.precision=fp32 -> train.linear_layers = fp8 | train.precision = fp32 | set that to auto
train.linear_layers=fp8 ; EXPERTS -> train.linear_layers = fp8 | moe.experts = 8 | train.linear_layers to megatron
train.linear_layers=fp8 ; model.hidden_size=120 -> train.linear_layers = fp8 | model.hidden_size = 120 | 112 or 128
train.linear_layers=fp8 ; model.head_dim=36 ; parallel.tensor=2 -> x head_dim / parallel.tensor = 72 | 64 or 80
train.linear_layers=fp8 ; model.ffn_hidden_size=176 ; parallel.tensor=2 ->
    model.ffn_hidden_size / parallel.tensor = 88 | 80 or 96
train.linear_layers=fp8 ; train.seq_len_tokens=248 -> x seq_len_tokens / parallel.context = 248 | 240 or 256
parallel.virtual_pipeline=2 -> parallel.virtual_pipeline = 2 | parallel.pipeline = 1 | set it to 1
parallel.pipeline=2 ; parallel.virtual_pipeline=3 ->
    model.num_layers = 8 | pipeline = 2 x parallel.virtual_pipeline = 3 | 6 or 12
parallel.pipeline=2 ; parallel.pipeline_layers=[3,4] ->
    parallel.pipeline_layers = [3, 4] | the sum 7 | give 2 numbers | the sum 8
parallel.pipeline=2 ; parallel.virtual_pipeline=2 ; parallel.pipeline_layers=[3,5] ->
    parallel.pipeline_layers = [3, 5] | 2 numbers | give 4 numbers | virtual_pipeline = 2
parallel.pipeline=2 ; parallel.pipeline_layers=[8,0] -> parallel.pipeline_layers = [8, 0] | the smallest 0 | at least 1
parallel.pipeline=2 ; parallel.virtual_pipeline=2 ; train.global_batch_size=20 ->
    train.global_batch_size = 20 | 5 micro-batches | parallel.pipeline = 2 | 16 or 24
parallel.pipeline=2 ; parallel.pipeline_layers=[3,5] ; gsa.selection_reuse=3 ->
    gsa.selection_reuse = 3 | 5 layers of a chunk (parallel.pipeline_layers)
parallel.context=3 ; train.seq_len_tokens=258 -> world size = 8 | parallel.context = 3 | start 6 or 9 ranks
train.seq_len_tokens=250 ; parallel.context=2 ->
    train.seq_len_tokens = 250 | parallel.context = 2 | 2 chunks | 248 or 252
train.seq_len_tokens=36 ; parallel.context=2 ; parallel.tensor=4 ->
    train.seq_len_tokens = 36 | not a multiple of 8 | parallel.tensor = 4 | 32 or 40
train.seq_len_tokens=256 ; parallel.context=2 ; parallel.context_chunks=3 ->
    parallel.context_chunks = 3 | even number | 4
train.seq_len_tokens=264 ; parallel.context=2 ; parallel.context_chunks=8 ->
    train.seq_len_tokens = 264 | multiple of 16 | 8 chunks | 256 or 272
parallel.context=2 ; gsa.dense_attention=cudnn ; data.attend_across_documents=true ->
    gsa.dense_attention = cudnn | parallel.context = 2 | set it to auto
model.head_dim=63 -> model.head_dim = 63 | odd | even
gsa.indexer_dim=63 -> gsa.indexer_dim = 63 | odd | even
parallel.tensor=1 ; parallel.pipeline=16 ; model.num_layers=16 -> world size = 8 | start 16 ranks
parallel.pipeline=3 ; model.num_layers=9 -> world size = 8 | parallel.pipeline = 3 | start 6 or 9 ranks
train.global_batch_size=20 -> train.global_batch_size = 20 | 8 data-parallel ranks | 16 or 24
train.micro_batch_size=2 -> train.global_batch_size = 24 | train.micro_batch_size = 2 | 16 or 32
parallel.overlap_param_gather=true -> parallel.overlap_param_gather = true | overlap_grad_reduce = false
parallel.overlap_param_gather=on ; parallel.overlap_grad_reduce=on ; parallel.distributed_optimizer=off ->
    parallel.overlap_param_gather = true | distributed_optimizer = false
parallel.strategy=deepspeed ; parallel.pipeline=2 ->
    parallel.pipeline = 2 | parallel.strategy = deepspeed | set it to 1, or parallel.strategy
parallel.strategy=deepspeed ; parallel.context=2 -> parallel.context = 2 | set it to 1
parallel.strategy=deepspeed ; parallel.distributed_optimizer=off ->
    parallel.distributed_optimizer = false | always shards | set it to true
parallel.strategy=deepspeed ; parallel.overlap_grad_reduce=on ->
    parallel.overlap_grad_reduce = true | by itself | set it to false
parallel.strategy=deepspeed ; parallel.zero_stage=4 -> parallel.zero_stage = 4 | not 1, 2 or 3
parallel.optimizer_instances=3 -> parallel.optimizer_instances = 3 | 8 data x context ranks
parallel.optimizer_instances=2 ; parallel.distributed_optimizer=off ->
    parallel.optimizer_instances = 2 | parallel.distributed_optimizer = false | set it to 1
train.optimizer=muon ; parallel.strategy=deepspeed -> train.optimizer = muon | whole matrices | set it to adamw, or
checkpoint.initial_text=continue ->
    checkpoint.initial_text = continue | there is no checkpoint whose text goes on
train.batch_ramp=[{until_tokens: 9, global_batch_size: 0}] -> train.batch_ramp.0.global_batch_size = 0 | below 1
train.batch_ramp=[{until_tokens: 9, global_batch_size: 48}] ->
    train.batch_ramp.0.global_batch_size = 48 | above train.global_batch_size = 24
train.batch_ramp=[{until_tokens: 9, global_batch_size: 3}] ->
    train.batch_ramp.0.global_batch_size = 3 | not a multiple of
train.batch_ramp=[{until_tokens: 9000, global_batch_size: 8}, {until_tokens: 9000, global_batch_size: 16}] ->
    train.batch_ramp.1.until_tokens = 9000 | where the stage begins
train.qk_clip=5 ->
    train.qk_clip = 5.0 | equal logits | ln(train.seq_len_tokens) = 5.55 | set it above that
train.qk_clip=100 ; model.qk_norm=on -> train.qk_clip = 100.0 | model.qk_norm = true | leave it at 0
train.qk_clip=100 ; parallel.strategy=deepspeed -> train.qk_clip = 100.0 | parallel.strategy = deepspeed | to megatron
train.qk_clip=100 ; gsa.dense_attention=cudnn ; data.attend_across_documents=on ->
    train.qk_clip = 100.0 | gsa.dense_attention = cudnn | set that to auto
train.muon_update_rms=0.4 -> train.muon_update_rms = 0.4 | train.optimizer = adamw ignores it | leave it out
parallel.optimizer_instances=2 ; parallel.strategy=deepspeed ->
    parallel.optimizer_instances = 2 | parallel.strategy = deepspeed | set it to 1
parallel.offload_optimizer=on -> parallel.offload_optimizer = true | parallel.strategy = megatron | to deepspeed
parallel.zero_stage=2 -> parallel.zero_stage = 2 | parallel.strategy = megatron | deepspeed
gsa.gate_granularity=headwise ; gsa.value_gate=off ; gsa.output_gate=off ->
    gsa.gate_granularity = headwise: without effect, for no gate is on
gsa.gate_granularity=headwise ; gsa.projection_gate=on ->
    gsa.gate_granularity = headwise: the output of W_O has no heads
gsa.gate_sharing=head_shared ; gsa.projection_gate=on -> gsa.gate_sharing = head_shared: the output of W_O has no heads
gsa.output_transform=silu -> gsa.output_transform = silu: stands in the place of G1
gsa.k_min=3000 -> gsa.k_min = 3000 | above gsa.k_base = 2048
gsa.k_max=2000 -> gsa.k_max = 2000 | below gsa.k_base = 2048
gsa.attention_kernel=gathered ; gsa.attention_impl=reference ->
    gsa.attention_kernel = gathered | gsa.attention_impl = reference
gsa.attention_kernel=masked ; train.seq_len_tokens=65536 -> gsa.attention_kernel = masked | train.seq_len_tokens = 65536
gsa.attention_impl=triton ; gsa.indexer_heads=9 ->
    gsa.attention_impl = triton | gsa.indexer_heads = 9 | 1 to 8 | use reference
gsa.attention_impl=triton ; gsa.indexer_dim=8 ->
    gsa.attention_impl = triton | gsa.indexer_dim = 8 | 16 to 128 | use reference
gsa.selection_reuse=3 -> gsa.selection_reuse = 3 | 8 layers of a stage
gsa.selection_reuse=8 ; parallel.pipeline=2 -> gsa.selection_reuse = 8 | 4 layers of a stage
gsa.indexer_temperature=0 -> gsa.indexer_temperature = 0.0 | learned
gsa.indexer_temperature=warm -> gsa.indexer_temperature = warm | learned
gsa.indexer_loss_row_fraction=0 -> gsa.indexer_loss_row_fraction | not 1 / n
gsa.indexer_loss_row_fraction=0.3 -> gsa.indexer_loss_row_fraction | not 1 / n
gsa.dense_attention=cudnn -> gsa.dense_attention = cudnn | data.attend_across_documents = false | auto
gsa.dense_attention=triton ; gsa.attention_impl=reference ->
    gsa.dense_attention = triton | gsa.attention_impl = reference
gsa.variance_ema_decay=1 -> gsa.variance_ema_decay = 1.0 | outside [0, 1)
train.recompute=full ; train.recompute_num_layers=3 -> train.recompute_num_layers = 3 | 8 layers
train.recompute=full ; gsa.selection_reuse=4 ; train.recompute_num_layers=2 ->
    train.recompute_num_layers = 2 | gsa.selection_reuse = 4 | set it to 4
monitor.window_steps=31 ; monitor.min_history_steps=24 -> monitor.window_steps = 31 | 32 or more
monitor.min_history_steps=129 -> monitor.min_history_steps = 129 | monitor.window_steps = 128
monitor.min_history_steps=23 -> monitor.min_history_steps = 23 | [24,
monitor.lasting_sigmas=7 -> monitor.lasting_sigmas = 7.0 | monitor.sigmas = 6.0
monitor.grad_norm_min_ratio=0.5 -> monitor.grad_norm_min_ratio = 0.5 | below 1
train.iterations_to_skip=[20,21] -> train.iterations_to_skip.1 = 21 | no step of this run, which has 20
train.iterations_to_skip=[3,0] -> train.iterations_to_skip.1 = 0 | no step
phases.0.decay=wsd ; phases.0.decay_steps=11 -> phases.0.decay_steps = 11 | not between 1 and the 10 steps
phases.0.decay_steps=3 -> phases.0.decay_steps = 3 | phases.0.decay = cosine has none | set phases.0.decay to wsd
phases.0.decay_shape=1-sqrt -> phases.0.decay_shape = 1-sqrt | phases.0.decay = cosine has none
phases.0.keep_optimizer=true -> phases.0.keep_optimizer = true | no phase precedes it | leave it out
phases.1.keep_optimizer=true -> phases.1.keep_optimizer = true | phase trains indexer, this phase all
evaluate.tasks=[./a, arc_easy] -> evaluate.tasks.1 = arc_easy | no request file | launch/evaluate.py
evaluate.tasks_every_steps=5 -> evaluate.tasks_every_steps = 5 | there are no evaluate.tasks
evaluate.tasks_max_time_percent=0 -> evaluate.tasks_max_time_percent = 0.0 | no share
monitor.recheck_every_steps=10 ; gsa.dense_attention=cudnn ; data.attend_across_documents=true ->
    monitor.recheck_every_steps | gsa.dense_attention = cudnn | bit for bit | auto
monitor.recheck_every_steps=10 ; parallel.strategy=deepspeed ->
    monitor.recheck_every_steps | parallel.strategy = deepspeed | set that to megatron
monitor.recheck_spikes=true ; parallel.strategy=deepspeed ->
    monitor.recheck_spikes | parallel.strategy = deepspeed | set that to megatron
monitor.compare_replicas_every_steps=5 ; parallel.strategy=deepspeed ->
    monitor.compare_replicas_every_steps | parallel.strategy = deepspeed | set that to megatron
monitor.compare_replicas_every_steps=5 ; parallel.tensor=2 ; parallel.pipeline=4 ->
    monitor.compare_replicas_every_steps = 5 | one replica
model.rotary_percent=1.5 -> model.rotary_percent = 1.5 | above 1
model.rotary_percent=0.3 -> model.rotary_percent = 0.3: turns 19 of | RoPE turns pairs | give 0.3125, which turns 20
model.rotary_percent=0.58 ; model.head_dim=100 ->
    model.rotary_percent = 0.58: turns 57 of | give 0.5800000000000001, which turns 58
checkpoint.keep_every_steps=15 ; checkpoint.every_steps=10 ->
    checkpoint.keep_every_steps = 15 | not a multiple of checkpoint.every_steps = 10
phases=[] -> phases = [] | no phase
phases.1.name=warmup -> phases = warmup | 2 phases
phases.1.name='' -> phases.1.name = '' | empty
parallel.expert=2 -> parallel.expert = 2 | there is no expert to split, for moe.experts = 0
phases.1.name="\e[2J" -> phases.1.name = | has characters that are not visible
phases.1.lr=0 ; phases.1.min_lr=0 -> phases.1.lr = 0.0 | not positive
phases.1.min_lr=1 -> phases.1.min_lr = 1.0 | above phases.1.lr
phases.1.warmup_steps=10 -> phases.1.warmup_steps = 10 | phases.1.steps = 10
phases.0.attention=sparse -> phases.0.train = indexer | phases.0.attention = sparse | eq. 14
gsa.attention=dense ; phases.0.train=all -> phases.1.attention = sparse | gsa.attention = dense
gsa.attention=dense ; phases.1.attention=dense -> phases.0.train = indexer | gsa.attention = dense
train.adam_beta2=1.0 -> train.adam_beta2 = 1.0 | outside [0, 1)
train.adam_beta1=-0.1 -> train.adam_beta1 = -0.1 | outside [0, 1)
train.grad_clip=nan -> train.grad_clip = nan | finite
phases.1.lr=inf -> phases.1.lr = inf | finite
gsa.indexer_temperature=nan -> gsa.indexer_temperature = nan | finite
data.max_bad_line_fraction=1.5 -> data.max_bad_line_fraction = 1.5 | outside [0, 1]
data.source_weights.Web=-0.1 -> data.source_weights.Web | outside [0, 100] | leaves the source out
data.source_weights.Web=nan -> data.source_weights.Web | outside [0, 100] | leaves the source out
data.packing=best_fit ; data.attend_across_documents=true ->
    data.packing = best_fit | needs data.attend_across_documents = false
data.validation_dir='' -> data.validation_dir | empty
data.validation_sets.wiki=' ' -> data.validation_sets.wiki | empty | give a value
train.global_batch_size=4000000 ->
    train.global_batch_size = 4000000 | tokens per step | count sequences, not tokens: at most
phases.1.lr=1e300 -> phases.1.lr = 1e+300: more than fp32 holds; give a smaller number
parallel.timeout_minutes=1e10 -> parallel.timeout_minutes = 10000000000.0: longer | give 1e+09 or less
data.read_timeout_seconds=98 ->
    data.read_timeout_seconds = 98 | data.read_retries = 5 | fails after 603.5 s, when parallel.timeout
data.read_retries=999999999999999 -> data.read_timeout_seconds = 60 | fails after 1.2e+17 s
run.dir=' ' -> run.dir | empty
run.dir=~/runs -> run.dir = ~/runs | only a shell fills in ~ and $; write {HOME}/runs
run.dir=/scratch/$NOBODY/runs -> run.dir = /scratch/$NOBODY/runs: only a shell fills in ~ and $
run.kernel_cache_dir=$NOBODY -> run.kernel_cache_dir = $NOBODY: only a shell fills in ~ and $
run.name=a/b -> run.name | plain folder name
run.name=.. -> run.name | plain folder name
run.name='a\b' -> run.name | plain folder name
"""

MOE_RULES = r"""
moe.experts=0 -> moe.expert_ffn_hidden_size = 32 | without effect, for moe.experts = 0
moe.experts=-1 -> moe.experts = -1 | negative
moe.top_k=9 -> moe.experts = 8 | fewer than moe.top_k = 9
moe.top_k=1 -> moe.top_k = 1 | always 1 | set it to 2 or more
moe.top_k=0 -> moe.top_k = 0 | below 1
moe.first_dense_layers=4 -> moe.first_dense_layers = 4 | model.num_layers = 4
moe.layer_interval=0 -> moe.layer_interval = 0 | below 1
moe.experts=9 ; parallel.expert=2 -> moe.experts = 9 | not a multiple of parallel.expert = 2
moe.shared_expert_ffn_hidden_size=9 ; parallel.tensor=2 -> moe.shared_expert_ffn_hidden_size = 9 | parallel.tensor = 2
moe.expert_ffn_hidden_size=36 -> moe.expert_ffn_hidden_size = 36 | multiples of 8 | sequential
moe.expert_ffn_hidden_size=8 ; parallel.tensor=2 ; parallel.expert_tensor=2 ->
    moe.expert_ffn_hidden_size = 8 | a rank has 4 of it | parallel.expert_tensor = 2
model.hidden_size=60 -> model.hidden_size = 60 | multiples of 8 | moe.experts_impl
moe.expert_ffn_hidden_size=33 ; parallel.tensor=2 ; parallel.expert_tensor=2 ->
    moe.expert_ffn_hidden_size = 33 | not a multiple of parallel.expert_tensor = 2
moe.balancing=aux_free -> moe.balancing = aux_free | moe.router_score = softmax | sigmoid
moe.bias_update_rate=0.1 -> moe.bias_update_rate = 0.1 | moe.balancing = global_batch | to aux_free
moe.balancing=none ; moe.balance_coeff=0.1 -> moe.balance_coeff = 0.1 | moe.balancing = none | to global_batch
moe.capacity_factor=0.5 -> moe.capacity_factor = 0.5 | even share | 1 or more
moe.capacity_factor=-1 -> moe.capacity_factor = -1.0 | negative
moe.routed_scale=0 -> moe.routed_scale = 0.0 | not positive
parallel.expert_tensor=2 -> parallel.expert_tensor = 2 | neither 1 nor parallel.tensor = 1
parallel.tensor=2 ; parallel.sequence=off -> parallel.sequence = false | with experts | set it to true
moe.experts=12 ; parallel.expert=3 ->
    world size = 8 | has 8 tensor x | multiple of parallel.expert = 3 | start 6 or 9 ranks | as 4
moe.experts=16 ; parallel.expert=8 ; parallel.pipeline=2 ->
    world size = 8 | a pipeline stage has 4 tensor x | start 16 ranks | such as 4
parallel.expert=4 ; parallel.optimizer_instances=4 ->
    parallel.optimizer_instances = 4 | does not divide the 2 replicas of an expert
parallel.strategy=deepspeed -> parallel.strategy = deepspeed | moe.experts = 8 | to megatron
"""

ROTARY_RULES = r"""
model.rope_scaling.factor=4 ->
    model.rope_scaling.factor = 4.0 | without effect with model.rope_scaling.rope_type = default
model.rope_scaling.rope_type=yarn ; model.rope_scaling.factor=4 ->
    model.rope_scaling.original_max_position_embeddings = 0 | not the length that YaRN extends
YARN ; model.rope_scaling.factor=0.5 -> model.rope_scaling.factor = 0.5 | below 1
YARN ; model.rope_scaling.factor=0 -> model.rope_scaling.factor = 0.0 | not positive
YARN ; model.rope_scaling.beta_slow=32 ->
    model.rope_scaling.beta_fast = 32.0 | not above model.rope_scaling.beta_slow = 32
YARN ; model.rope_scaling.attention_factor=-1 -> attention_factor = -1.0 | negative
YARN ; model.rope_base=1 -> model.rope_base = 1.0 | not above 1 with YaRN
"""

GRAPH_RULES = r"""
parallel.tensor=2 -> parallel.tensor = 2 exchanges tensors | ; set that to 1
parallel.context=2 -> parallel.context = 2 exchanges tensors | ; set that to 1
parallel.pipeline=2 -> parallel.pipeline = 2 exchanges tensors | ; set that to 1
parallel.strategy=deepspeed -> parallel.strategy = deepspeed | ; set that to megatron
parallel.overlap_param_gather=on -> parallel.overlap_param_gather = true | ; set that to false
train.global_batch_size=32 -> parallel.overlap_grad_reduce = true | only micro-batch | ; set that to false
train.batch_ramp=[{until_tokens: 9, global_batch_size: 32}] -> parallel.overlap_grad_reduce = true | only micro-batch
train.recompute=full -> train.recompute = full | ; set that to none
train.recompute=selective -> train.recompute = selective | ; set that to none
train.fused_ops=none -> train.fused_ops = none | ; set that to auto
gsa.attention_impl=reference -> gsa.attention_impl = reference | ; set that to auto
logging.every_steps=1 -> logging.every_steps = 1 | ; set that to 2 or more
gsa.attention_kernel=gathered -> gsa.attention_kernel = gathered | auto
train.seq_len_tokens=65536 -> of 65536 tokens (train.seq_len_tokens) | set train.seq_len_tokens to 32768 or less
EXPERTS ; moe.experts_impl=sequential -> moe.experts_impl = sequential | ; set that to grouped
EXPERTS ; train.precision=fp32 -> train.precision = fp32 | ; set that precision to bf16
EXPERTS ; parallel.expert=2 -> parallel.expert = 2 reads back | ; set that to 1
EXPERTS ; moe.capacity_factor=1.25 -> moe.capacity_factor = 1.25 | ; set that to 0
"""

Rule = tuple[list[str], list[str]]


def rules_of(table: str) -> list[Rule]:
    rows: list[Rule] = []
    for row in table.strip().replace("\n    ", " ").splitlines():
        overrides, _, fragments = row.partition(" -> ")
        words = [each for word in overrides.split(" ; ") for each in SHORT.get(word, [word])]
        rows.append((words, fragments.replace("{HOME}", expanduser("~")).split(" | ")))
    return rows
