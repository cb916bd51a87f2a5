"""Every field a user can set, and the one path by which it is set.

    dataclass defaults <- YAML file <- key=value on the command line

The text under a field says what it means; a name carries its unit (`_tokens`, `_steps`, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Union

import yaml

from gsa_train.config_checks import check_config, check_data, check_initial_weights, check_packages
from gsa_train.config_load import ConfigError, Problems, apply_override, build, read_yaml


@dataclass(frozen=True)
class RunConfig:
    name: str = "run"
    """The run folder is `<dir>/<name>`; a second start with the same folder resumes from its `latest`."""
    dir: str = "runs"
    """Folder that holds all runs."""
    seed: int = 1234
    """Seed of the initial weights and of the random number generators (the data order has its own)."""
    time_limit_minutes: float = 0.0
    """So long after its launch the run saves, stops and exits with code 75; 0 = no limit."""
    slurm_margin_minutes: float = 5.0
    """The same, so long before the end of the Slurm job, where Slurm tells it (or 10% of the job, if that is less)."""


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int = 4
    """Transformer layers."""
    hidden_size: int = 256
    """Width d of the residual stream."""
    num_heads: int = 4
    """Query heads n_h."""
    num_kv_heads: int = 2
    """Key-value heads n_kv; each is shared by num_heads / num_kv_heads query heads."""
    head_dim: int = 64
    """Size d_k of one head."""
    ffn_hidden_size: int = 704
    """Inner width of the SwiGLU feed-forward layer."""
    vocab_size: int = 4096
    """Rows of the embedding; at least the tokenizer's size."""
    rope_base: float = 10000.0
    """Base of the rotary embedding on Q and K."""
    qk_norm: bool = False
    """RMSNorm on each head's Q and K before the rotary embedding."""
    norm_epsilon: float = 1e-5
    """Epsilon of RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections use init_std / sqrt(2 num_layers)."""
    tie_embeddings: bool = False
    """Share the input embedding with the output layer."""


@dataclass(frozen=True)
class GSAConfig:
    attention: Literal["dense", "sparse"] = "sparse"
    """`dense` builds no indexer (the baselines standard and gated-only); `sparse` builds one."""
    value_gate: bool = True
    """G2: V * sigmoid(h W + b) (eq. 9)."""
    output_gate: bool = True
    """G1: O * sigmoid(h W + b), elementwise and head-specific (eq. 10)."""
    gate_bias_init: float = 0.0
    """Initial bias of both gates; 0 opens them to 0.5 (section 3.5 of the paper)."""
    indexer_heads: int = 4
    """Heads H_I of the lightning indexer."""
    indexer_dim: int = 64
    """Head size d_I of the indexer."""
    indexer_activation: Literal["sigmoid", "relu"] = "sigmoid"
    """`sigmoid` = GSA (eq. 7); `relu` with unbounded weights = DSA."""
    indexer_rope: bool = False
    """Rotary embedding on the indexer's queries and key, as DeepSeek's indexer has."""
    indexer_temperature: Union[float, str] = 1.0  # noqa: UP007 - OmegaConf reads typing.Union
    """beta in softmax(beta * I) of the indexer loss: a number, or `learned` (starts at 1)."""
    indexer_loss_row_fraction: float = 1.0
    """Share of the queries, 1 / n, from which training estimates the indexer loss without bias: every n-th run of 128,
    begun anew per micro-batch and layer. 1 = the paper, below it is cheaper and noisier. Validation uses all."""
    adaptive_k: Literal["inverse", "direct", "off"] = "inverse"
    """Budget rule (eq. 8): `inverse` k_base * ema / var, `direct` k_base * var / ema, `off` k_base."""
    k_base: int = 2048
    """Keys per query before adaptation."""
    k_min: int = 256
    """Smallest budget k_t."""
    k_max: int = 4096
    """Largest budget k_t."""
    variance_ema_decay: float = 0.99
    """Decay per optimizer step of the moving average of the score variance."""
    local_window: int = 0
    """The last `local_window` keys are always selected, beside the budget; 0 = the paper."""
    selection_block: int = 1
    """Aligned blocks of this many queries share the selection of their first query; 1 = the paper."""
    selection_reuse: int = 1
    """Layers in groups of this many share the selection of the group's first layer; 1 = the paper."""
    attention_impl: Literal["auto", "triton", "reference"] = "auto"
    """`triton`: fused kernels (GPU). `reference`: plain torch with L x L tensors. `auto`: triton on a GPU where its
    kernels cover the config, else reference; the run says at its start which it is."""
    attention_kernel: Literal["auto", "masked", "gathered"] = "auto"
    """Of the fused kernels for selections: `masked` visits all tiles of keys under a mask of bits, `gathered` fetches
    the keys that each 32 queries selected. `auto`: masked below 16384 tokens, from there what the selection's measured
    density favours, gathered above 32768 tokens and for shared selections."""
    dense_attention: Literal["auto", "cudnn", "flash_sdpa", "flash_attn", "triton"] = "auto"
    """Beside the fused kernels, what runs dense passes from which no indexer learns: our kernel, torch's cuDNN or
    FlashAttention-2 kernels, or the package flash-attn. Only `triton` stops at documents; not all of them repeat bit
    for bit. `auto` is triton."""


@dataclass(frozen=True)
class ParallelConfig:
    tensor: int = 1
    """Tensor-parallel ranks."""
    sequence: bool = True
    """Sequence parallelism over the tensor-parallel ranks (no effect with tensor=1)."""
    context: int = 1
    """Context-parallel ranks: each holds `context_chunks` chunks of every sequence and sees the keys of all of it."""
    context_chunks: int = 2
    """Even. With 2 all ranks have the same causal work. More bring their work over selected keys and their memory
    nearer to each other, for more launches."""
    pipeline: int = 1
    """Pipeline stages (1F1B). What is left of the world after tensor x context x pipeline is data parallel."""
    virtual_pipeline: int = 1
    """Model chunks per stage (interleaved 1F1B): stages wait less and send more. Above 1 the micro-batches of a step
    must be a multiple of `pipeline`."""
    pipeline_layers: list[int] = field(default_factory=list)
    """Layers of each chunk in the order of the model, pipeline x virtual_pipeline numbers; chunk i goes to stage
    i % pipeline. Empty: all the same. The first chunk also has the embedding, the last one the output and the loss."""
    strategy: Literal["megatron", "deepspeed"] = "megatron"
    """Who holds gradients and optimizer state of the data-parallel ranks: megatron-core, or DeepSpeed's ZeRO
    (`pip install 'gsa-train[deepspeed]'`; with `tensor` and `sequence`, without `context` and `pipeline`)."""
    zero_stage: int = 1
    """With strategy=deepspeed, what is sharded: 1 the optimizer state, 2 the gradients, too, 3 the weights, too."""
    offload_optimizer: bool = False
    """With strategy=deepspeed: fp32 weights and moments are in host memory, and its CPUs update them (give each rank
    OMP_NUM_THREADS). On CPUs it only changes the code that runs."""
    distributed_optimizer: bool = True
    """With strategy=megatron: shard the optimizer state over the data-parallel ranks."""
    optimizer_instances: int = 1
    """With distributed_optimizer: groups of data x context ranks, each with a whole optimizer state, sharded within
    (HSDP): more memory, and only reduced gradients pass between them. A divisor of data x context."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """What gradients are added up in, over micro-batches and over ranks. `bf16` halves their memory and traffic and
    rounds each sum; it needs weights in bf16."""
    overlap_grad_reduce: bool = False
    """Reduce gradients during the backward pass (phases that train the base)."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the forward pass; needs distributed_optimizer and overlap_grad_reduce."""
    timeout_minutes: float = 10.0
    """A collective that takes longer has failed, and so has a rank that shows no progress for so long: the run ends
    with an error and names it. Above the longest compilation, validation of one source, or save."""


@dataclass(frozen=True)
class PhaseConfig:
    name: str = "sparse"
    """Name in logs, metrics and checkpoints; unique."""
    steps: int = 1000
    """Optimizer steps of this phase."""
    attention: Literal["dense", "sparse"] = "sparse"
    """Attend to all visible keys, or to the selected ones."""
    train: Literal["all", "base", "indexer"] = "all"
    """`indexer` freezes the rest (warm-up); `base` leaves the indexer as it is; `all` trains both."""
    lr: float = 3e-4
    """Peak learning rate of the base (of the indexer when train is `indexer`)."""
    min_lr: float = 3e-5
    """Learning rate at the end of the phase."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0. Each phase starts with fresh moments of AdamW."""
    decay: Literal["cosine", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    indexer_lr_mult: float = 10.0
    """Learning rate of the indexer over that of the base, when both are trained (table 3)."""
    gate_lr_mult: float = 1.0
    """Learning rate of the gates over that of the base (table 3)."""
    kl_coeff: float = 1.0
    """Weight lambda of the indexer loss (eq. 15)."""


@dataclass(frozen=True)
class TrainConfig:
    seq_len_tokens: int = 256
    """Tokens per sequence."""
    micro_batch_size: int = 1
    """Sequences per forward pass and data-parallel replica."""
    global_batch_size: int = 8
    """Sequences per optimizer step over all ranks."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """`auto`: bf16 on GPUs, fp32 on CPUs. With bf16 the optimizer keeps fp32 weights."""
    fused_ops: Literal["auto", "triton", "none"] = "auto"
    """SwiGLU, cross-entropy, and split + rotary embedding + G2 (heads of 32, 64 or 128 without qk_norm) as one Triton
    kernel each way; with bf16 weight gradients added in fp32 by their matrix product. `auto`: on GPUs; `none`:
    megatron-core's operations, one by one."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, the attention core, or whole layers."""
    recompute_num_layers: int = 1
    """Layers per recomputed unit with recompute=full."""
    weight_decay: float = 0.1
    """AdamW weight decay; norms and biases have none."""
    adam_beta1: float = 0.9
    """AdamW beta 1."""
    adam_beta2: float = 0.95
    """AdamW beta 2."""
    adam_epsilon: float = 1e-8
    """AdamW epsilon."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    iterations_to_skip: list[int] = field(default_factory=list)
    """Steps, counted from 1 as in the metrics, whose batches are read but not trained on; step number and learning rate
    go on."""


@dataclass(frozen=True)
class DataConfig:
    train_dir: str = "data/sample/train"
    """Folder, or fsspec address (s3://, gs://, hf://, ...), of the training shards: all `*.jsonl`, `*.jsonl.zst`,
    `*.jsonl.gz` and `*.parquet` below it, mixed as they come; or of tokens that `prepare.py tokens` made of them,
    or of megatron-core's indexed datasets (`*.bin` and `*.idx`)."""
    validation_dir: str = "data/sample/validation"
    """The same for validation: one set, named `validation`. Not read when `validation_sets` names any."""
    validation_sets: dict[str, str] = field(default_factory=dict)
    """Several validation sets, `name: folder`, each scored apart; they take the place of `validation_dir`. A name is
    letters, digits and _. `validation_loss`, the attention's statistics and the n-gram baselines are of the first."""
    tokenizer: str = "data/sample/tokenizer.model"
    """Sentencepiece model or Hugging Face tokenizer.json, also at an fsspec address."""
    eos_token: str = ""
    """Token that ends each document; empty: sentencepiece's EOS, or tokenizer.json's `</s>`, `<|endoftext|>`, ..."""
    text_field: str = "text"
    """Field (of JSON lines) or column (of Parquet) that holds a document's text. Fixed for a run."""
    seed: int = 0
    """Seed of the order of shards and documents, and of which documents a weight leaves out."""
    num_lanes: int = 8
    """Interleaved streams that fix the global order; a multiple of data-parallel ranks x workers. Fixed for a run."""
    shuffle_documents: bool = True
    """Shuffle the documents of each shard."""
    source_weights: dict[str, float] = field(default_factory=dict, metadata={"any_names": True})
    """How often each document of a source (`meta.redpajama_set_name`; `unknown` where a line names none) comes in an
    epoch: 0 leaves the source out, 0.5 takes it every other epoch, 2 twice; sources without a weight come once. May
    change at a resume. Text and tokens of `prepare.py tokens` only."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """Training sequences: documents in a row, cut where a sequence ends; or whole documents chosen to fill it, so that
    only those longer than a sequence are cut (data/gsa_data/best_fit.py). Fixed for a run."""
    packing_pool_documents: int = 128
    """Documents of each lane among which `best_fit` chooses; each resume reads them again. Fixed for a run."""
    attend_across_documents: bool = False
    """False: attention, selection and variance stop at the document's start, and an EOS predicts nothing."""
    num_workers: int = 0
    """Reader processes per data-parallel rank; 0 reads in the training process."""
    prefetch_blocks: int = 64
    """Blocks that each rank reads ahead when it has workers, all of them together."""
    on_bad_shard: Literal["fail", "skip"] = "fail"
    """What a shard does that is missing, unreadable, damaged, a copy of another or too full of bad lines: stop the
    run, or be left out as far as it is bad, with a log line and in `data_skipped_shards`. Validation always fails."""
    max_bad_line_fraction: float = 0.01
    """Lines without readable text are left out and counted; a shard with a larger share of them is a bad shard."""
    max_document_bytes: int = 33554432
    """Longer documents are left out and counted; one MiB takes a reader about a second."""
    read_retries: int = 5
    """Times that a read which failed or timed out is tried again, after 0.5, 1, 2, 4, ... seconds."""
    read_timeout_seconds: float = 120.0
    """A read that brings nothing for so long has failed. A reader process that hangs stops the run a minute after
    the last retry must have ended."""

    @property
    def validation_folders(self) -> dict[str, str]:
        """name -> folder of the validation sets in their order."""
        return self.validation_sets or {"validation": self.validation_dir}


@dataclass(frozen=True)
class EvaluateConfig:
    every_steps: int = 0
    """Steps between validations; 0 = only at the end of the run."""
    max_blocks: int = 64
    """Sequences used of each validation set."""
    split_by_source: bool = False
    """Score the documents of these sequences again, packed by `meta.redpajama_set_name`: a perplexity per source."""
    ngram_baselines: bool = False
    """At the end, score unigram and bigram models of the same training tokens (reads them again: small runs)."""


@dataclass(frozen=True)
class MonitorConfig:
    action: Literal["log", "skip", "lower_lr", "rewind", "stop"] = "log"
    """What a spike does. `log`: it is recorded; a loss or gradient that is not finite stops the run. The others leave
    out the update of each spiking step and then: `skip`, nothing else; `lower_lr`, a lower learning rate for a while;
    `rewind`, back to an earlier checkpoint, on without the batches around the spike; `stop`, end with exit code 13."""
    detector: Literal["robust", "sigma"] = "robust"
    """`robust`: loss and log of the gradient norm against running medians, also a smaller rise that lasts or is one of
    both. `sigma`: OLMo-core's rule, mean + sigmas * standard deviation."""
    window_steps: int = 128
    """Steps of history that a step is judged by."""
    min_history_steps: int = 64
    """Steps of a phase before the first one is judged."""
    sigmas: float = 6.0
    """Rise of a single step that makes it a spike, in standard deviations of the noise."""
    lasting_sigmas: float = 3.0
    """Rise that makes a spike when it lasts `lasting_steps`; its least rises are half of those of a single step."""
    lasting_steps: int = 8
    """Steps in a row above `lasting_sigmas`, the last of which is a spike. Batches of the same lanes are alike for some
    steps, and text alone kept them above for 6."""
    loss_min_rise_nats: float = 0.2
    """A loss that rises by less is no spike, however quiet it was."""
    grad_norm_min_ratio: float = 4.0
    """A gradient norm that rises by a smaller factor is no spike. AdamW's second moment with beta 2 = 0.95 remembers 20
    steps, which a norm 20^0.5 = 4.5 times as large outweighs; rare documents alone make factors of 3. Where
    `train.grad_clip` leaves less of it, a norm alone is a spike from this factor's square on, or when it lasts."""
    patience_steps: int = 3
    """lower_lr, rewind and stop act after this many spiking steps in a row, whose updates are left out."""
    max_skips_in_a_row: int = 50
    """skip and lower_lr stop the run when they have left out this many updates in a row."""
    lower_lr_factor: float = 0.5
    """Factor on all learning rates after a spike, with lower_lr."""
    lower_lr_steps: int = 200
    """Steps for which it holds; another spike starts them anew."""
    rewind_min_steps: int = 100
    """The checkpoint gone back to is at least this much older than the spike's first step."""
    rewind_skip_before_steps: int = 100
    """Batches left out before the spike's first step, as far as they come after that checkpoint."""
    rewind_skip_after_steps: int = 100
    """Batches left out behind the last spiking step seen."""
    max_rewinds: int = 3
    """The spike after that many rewinds stops the run."""
    recheck_every_steps: int = 0
    """Steps between those computed twice, forward and backward: loss and each rank's gradients must be equal to the
    last bit. 0: none."""
    recheck_spikes: bool = False
    """Compute each spiking step twice before anything is done about it; the host waits for the device at every step."""
    compare_replicas_every_steps: int = 0
    """Steps between comparisons of the data-parallel replicas' weights, bit by bit; also before each save. 0: none."""
    on_corruption: Literal["stop", "log"] = "stop"
    """When bits differ: end the run with exit code 14, to go on from the last checkpoint, or only record it (event
    `corruption`); of a step computed twice the second numbers then count."""


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 500
    """Steps between checkpoints; the end of the run always writes one."""
    keep_last: int = 3
    """Checkpoints kept; older ones are deleted once a newer one is durable."""
    async_save: bool = True
    """Training waits only for a copy in host memory (on GPUs pinned and kept: this rank's share of the checkpoint);
    writing goes on behind it. False waits until the checkpoint is durable."""
    save_retries: int = 3
    """A failed save is reported and tried again with the state of a later step, so many times in a row; then the run
    stops (exit code 3)."""
    retry_after_steps: int = 10
    """Steps until the first new try; twice as many before each following one. A regular save counts as a try."""
    verify: Literal["full", "sizes"] = "full"
    """What a resume checks of a checkpoint before it loads it: every file's size and checksum (the ranks together read
    it once more), or sizes only."""
    initial_weights: str = ""
    """Folder of a checkpoint (or of a run: its newest one) whose weights a run has at step 0. All else begins anew:
    text, optimizer, schedules. Lengths, rotary base, budgets and phases may be others; gates and indexer may be new."""


@dataclass(frozen=True)
class LoggingConfig:
    every_steps: int = 10
    """Steps between logged steps."""
    tensorboard: bool = True
    """Write TensorBoard events to the run folder."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto`: online when an API key is configured, else offline."""
    wandb_project: str = "gsa_train"
    """Weights & Biases project."""
    wandb_entity: str = ""
    """User or team that the project belongs to; empty: W&B's default."""
    wandb_group: str = ""
    """Group of runs that W&B shows together, as the arms of one comparison; empty: none."""
    wandb_tags: list[str] = field(default_factory=list)
    """Words to find the run by in W&B."""
    straggler_ratio: float = 1.5
    """Warn when a rank works so many times as long as the median rank, without what it waits for others."""
    plots: bool = True
    """Write plots/*.png and report.html at the end of the run."""


@dataclass(frozen=True)
class ProfileConfig:
    start_step: int = 0
    """First step that torch's profiler traces, counted from 1 as in the metrics; 0 = none. Logged steps measure the
    attention, too, and so take longer than the others."""
    steps: int = 3
    """Steps traced, of which 5 are plenty: files grow by megabytes a step."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that trace, each to files of its own; empty: all."""
    memory_snapshot: bool = False
    """Also record every allocation on the CUDA device in these steps, with its Python stack."""


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    gsa: GSAConfig = field(default_factory=GSAConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    phases: list[PhaseConfig] = field(default_factory=list)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)


def load_config(
    path: str | Path, overrides: Sequence[str] = (), world_size: int | None = None, need_data: bool = True
) -> Config:
    """The config of a run: defaults <- the YAML file <- `key=value` overrides.

    Args:
        path: the YAML file.
        overrides: `section.field=value`, or `phases.0.field=value` for an item of a list; the last one wins.
        world_size: ranks of the run; with it the fields are also checked against each other. None only reads
            and types the file, as for the saved config of a finished run.
        need_data: with a world size, also check that the local data files exist, and the packages that the run needs.

    Raises:
        ConfigError: lists everything that is wrong, a line each.
    """
    tree = read_yaml(path)
    problems = Problems(Config)
    for override in overrides:
        apply_override(tree, override, problems)
    config = build(Config, tree, problems)
    if world_size is not None:
        found = check_config(config, world_size)
        if need_data:
            found += check_data(config.data) + check_initial_weights(config) + check_packages(config)
        problems.lines += [line for line in found if not problems.explain(line)]
    if problems.lines:
        raise ConfigError(path, problems.lines)
    return config


def config_to_yaml(config: Config) -> str:
    """Every field as YAML; `load_config` reads it back equal, floats bit for bit."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)
