"""What a dry run says of memory: sizes that follow from each other. test_memory_trace.py has the real step."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from gsa_kernels import limits
from gsa_train.config import load_config
from gsa_train.model.flops import count_parameters
from gsa_train.planning.memory import selection as memory_selection
from gsa_train.planning.memory.estimate import estimate_memory
from gsa_train.planning.memory.selection import gathered_heads
from gsa_train.planning.memory.sizes import sizes_of

GSA = Path(__file__).parents[2] / "configs" / "gsa_1.7b.yaml"
HIDDEN = 2 * 4 * 4096 * 2048
"""Bytes of what one layer hands to the next: four sequences in bf16."""


def estimate(overrides=(), world_size=8, stage=0, phase=-1):
    config = load_config(GSA, overrides, world_size=world_size, need_data=False)
    return estimate_memory(config, config.phases[phase], world_size, stage)


def test_parameters_and_their_state():
    config = load_config(GSA)
    count = count_parameters(config.model, config.gsa, config.moe)
    sparse = estimate()
    assert sparse.weights == pytest.approx(2 * count.total)
    assert sparse.gradients == pytest.approx(4 * count.total)
    assert sparse.optimizer == pytest.approx(12 * count.total / 8)
    assert estimate(["parallel.distributed_optimizer=off"]).optimizer == pytest.approx(12 * count.total)
    assert estimate(["parallel.grad_reduce_dtype=bf16"]).gradients == pytest.approx(2 * count.total)
    assert estimate(["parallel.optimizer_instances=2"]).optimizer == pytest.approx(12 * count.total / 4)
    deepspeed = ["parallel.strategy=deepspeed"]
    deepspeed += ["parallel.overlap_grad_reduce=off", "parallel.overlap_param_gather=off"]
    zero = estimate([*deepspeed, "parallel.zero_stage=3"])
    assert zero.weights == pytest.approx(2 * count.total / 8)
    assert zero.gradients == pytest.approx(4 * count.total / 8)
    assert zero.optimizer == sparse.optimizer
    assert estimate(deepspeed, phase=0).activations > 0
    assert estimate([*deepspeed, "parallel.offload_optimizer=on"]).optimizer == 0
    warmup = estimate(phase=0)
    assert warmup.weights == sparse.weights
    assert warmup.gradients == pytest.approx(4 * count.indexer)
    assert warmup.activations == 0
    single = estimate(["train.precision=fp32"])
    assert single.weights == pytest.approx(4 * count.total)
    assert single.optimizer == pytest.approx(8 * count.total / 8)


@pytest.mark.parametrize("tied", ["on", "off"])
def test_the_ranks_together_hold_the_model(tied):
    overrides = ["parallel.tensor=2", "parallel.pipeline=2", f"model.tie_embeddings={tied}"]
    config = load_config(GSA, overrides)
    count = count_parameters(config.model, config.gsa, config.moe)
    held = sum(2 * estimate(overrides, stage=stage).weights / 2 for stage in range(2))
    replicated = count.norms + count.indexer
    tied_copy = count.embedding if tied == "on" else 0
    assert held == pytest.approx(count.total + replicated + tied_copy)


def test_one_forward_one_backward_keeps_more_on_early_stages():
    stages = [estimate(["parallel.pipeline=4", "data.num_lanes=64"], stage=stage) for stage in range(4)]
    last = stages[-1].activations
    sent = last + HIDDEN  # what a stage sends on it holds, too
    assert [stage.activations for stage in stages] == pytest.approx([4 * sent, 3 * sent, 2 * sent, last])
    assert [stage.logits > 0 for stage in stages] == [False, False, False, True]
    few = ["parallel.pipeline=4", "train.global_batch_size=16"]  # 2 micro-batches
    assert estimate(few).activations == pytest.approx(2 * sent)


def test_uneven_stages_hold_and_keep_what_their_layers_need():
    stages = [
        estimate(["parallel.pipeline=2", "parallel.pipeline_layers=[18,6]"], stage=stage) for stage in (0, 1)
    ]
    even = [estimate(["parallel.pipeline=2"], stage=stage) for stage in (0, 1)]
    # Two in flight of three times as many layers.
    assert stages[0].activations == pytest.approx(6 * stages[1].activations + 2 * HIDDEN)
    assert sum(s.weights for s in stages) == pytest.approx(sum(s.weights for s in even))
    assert stages[0].weights > stages[1].weights


def test_interleaving_keeps_more_in_flight():
    plain, interleaved = (
        [
            estimate(["parallel.pipeline=4", "data.num_lanes=64", f"parallel.virtual_pipeline={v}"], stage=s)
            for s in (0, 3)
        ]
        for v in (1, 2)
    )
    assert interleaved[0].weights == plain[0].weights
    one = plain[1].activations  # a micro-batch
    # Each chunk sends its result on, but the model's last one.
    assert interleaved[0].activations == pytest.approx((2 * 3 + 4 + 1) / 2 * (one + 2 * HIDDEN))
    assert interleaved[1].activations == pytest.approx((4 + 1) / 2 * (one + HIDDEN))


REFERENCE = "gsa.attention_impl=reference"


def test_recomputation_saves_activations():
    modes = ("none", "selective", "full")
    kept = {mode: estimate([REFERENCE, f"train.recompute={mode}"]).activations for mode in modes}
    assert kept["none"] > 2 * kept["selective"] > 4 * kept["full"] > 0
    # Whole layers: four bf16 inputs of [4096, 2048] per recomputed unit.
    assert kept["full"] == 24 * 4 * 2 * 4096 * 2048
    units_of_four = estimate(["train.recompute=full", "train.recompute_num_layers=4"])
    assert units_of_four.activations == kept["full"] / 4
    assert units_of_four.working > estimate(["train.recompute=full"]).working


def test_squares_grow_with_the_square_of_the_length():
    short, long = (
        estimate([REFERENCE, "train.recompute=selective", f"train.seq_len_tokens={length}"])
        for length in (4096, 8192)
    )
    assert 3 * short.working < long.working < 4 * short.working  # what grows with L alone is there, too
    # Reference attention: two fp32 copies of [n_h, L, L], its gradients as many, and what the indexer keeps.
    assert short.working > 4 * 2 * 8 * 16 * 4096**2


def test_the_kernels_keep_a_selection_as_bits_and_nothing_else_square():
    short, long = (estimate([f"train.seq_len_tokens={length}"]) for length in (4096, 8192))
    # Scores and targets go through in chunks.
    assert long.working <= 2 * short.working
    assert long.activations - 2 * short.activations == pytest.approx(24 * 4 * (8192**2 - 2 * 4096**2) / 8)


def test_lists_grow_with_the_length_and_not_with_its_square():
    for options in (["gsa.attention_kernel=gathered"], ["gsa.selection_block=32", "gsa.local_window=64"]):
        options += ["gsa.k_min=16", "gsa.k_base=16", "gsa.k_max=16"]
        short, long = (estimate([f"train.seq_len_tokens={length}", *options]) for length in (32768, 65536))
        # A sequence's first queries see fewer keys than 32 of them may select.
        assert long.activations == pytest.approx(2 * short.activations, rel=1e-3)
        sums = 4 * 4 * 32768 * 2 * 4 * 128  # of dK and dV: 4 sequences, 4 heads of 128, in fp32
        assert sums < long.working - short.working <= short.working


def test_lists_are_counted_at_their_longest():
    """For each tile of 2 sequences what its queries see, at most 32 x k_base: a key and a word each."""
    options = ["gsa.attention_kernel=gathered", "train.micro_batch_size=2"]
    for context, visible in ((1, range(1, 4097)), (2, range(1025, 3073)), (4, range(1537, 2561))):
        layout = [f"parallel.context={context}"]
        few = estimate([*options, *layout, "gsa.k_min=1", "gsa.k_base=1"])
        many = estimate([*options, *layout, "gsa.k_base=96", "gsa.k_min=1"])
        entries = 2 / 32 * sum(min(96 * 32, keys) - min(32, keys) for keys in visible)
        assert many.activations - few.activations == pytest.approx(24 * 8 * entries, rel=1e-3)


def test_the_loss_gathers_the_heads_of_all_tensor_parallel_ranks():
    """As triton_core.gather_heads has them: queries and keys in bf16, log-sum-exps in fp32; of one run of queries."""
    for layout, tokens in (
        (["parallel.tensor=4"], 4096),
        (["parallel.tensor=4", "parallel.context=2"], 1024),
    ):
        config = load_config(GSA, layout, world_size=8, need_data=False)
        shapes = (
            (4, tokens, 16, 128, torch.bfloat16),
            (4, 4096, 4, 128, torch.bfloat16),
            (4, 16, tokens, torch.float32),
        )
        tensors = [torch.empty(shape[:-1], dtype=shape[-1], device="meta") for shape in shapes]
        assert gathered_heads(sizes_of(config)) == sum(each.nbytes for each in tensors)
    alone = load_config(GSA, [], world_size=8, need_data=False)
    assert gathered_heads(sizes_of(alone)) == 0


def test_beyond_the_longest_mask_selections_are_lists():
    sizes = ["gsa.k_base=256", "gsa.k_min=256"]
    masked, lists = (estimate([f"train.seq_len_tokens={length}", *sizes]) for length in (32768, 65536))
    assert lists.activations < 2 * masked.activations


def test_context_parallelism_divides_what_grows_with_the_length():
    one, two = estimate([REFERENCE]), estimate([REFERENCE, "parallel.context=2"])
    weight = 2 * 128256 * 2048  # what stands for the gradient of the output layer's
    assert two.logits - weight == (one.logits - weight) / 2
    assert two.weights == one.weights
    assert two.optimizer == one.optimizer  # over as many ranks
    assert (
        one.activations / 4 < two.activations < one.activations / 2
    )  # each chunk sees the keys before its end
    one, two = (
        estimate([REFERENCE, "train.recompute=selective", f"parallel.context={size}"]) for size in (1, 2)
    )
    keys = 24 * 2 * 4 * 4096 * 64  # the indexer's stay whole, in bf16; K and V are gathered again
    selections = 24 * 4 * 4096**2
    assert two.activations == pytest.approx(
        (one.activations - selections) / 2 + keys / 2 + selections * 5 / 16
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (3, 80), (4, 64), (6, 40), (7, 36), (2, 8)])
def test_partial_gradients_are_those_of_the_loss(monkeypatch, heads, dim, dtype):
    pytest.importorskip("triton")
    from gsa_kernels.loss import triton_launch
    from gsa_kernels.sampling import SampledRows

    taken = []

    def scratch(*shape, dtype, device):
        taken.append(torch.empty(shape, dtype=dtype, device=device))
        return taken[-1]

    def tensor(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    monkeypatch.setattr(triton_launch, "scratch", scratch)
    length = 2048
    q_idx, k_idx, weights = (
        tensor(1, length, heads, dim),
        tensor(1, length, dim),
        tensor(1, length, heads),
    )
    nothing = (None, None)
    inputs = triton_launch.Inputs(q_idx, k_idx, weights, *nothing, tensor(1), *nothing, kind=0)
    outputs = triton_launch.new_outputs(inputs, with_gradients=True, sampled=False, one_chunk=True)
    blocks = triton_launch.choose_blocks(inputs)
    triton_launch.chunk_launches(
        inputs, outputs, tensor(1, 1, length, length), SampledRows(0, length), blocks
    )
    partial = sum(each.nbytes for each in taken if each.ndim == 5)
    expected = memory_selection.loss_gradient_bytes(heads, dim, dtype.itemsize)
    assert partial == pytest.approx(expected * length**2)


@pytest.mark.parametrize(
    ("heads", "head_size", "tiles", "keys", "segments"),
    [((24, 2), 256, 40, 26000, 3), ((16, 1), 128, 40, 128000, 13), ((16, 1), 128, 40, 8000, 1)],
)
def test_segments_of_lists_fit_what_is_counted_for_them(monkeypatch, heads, head_size, tiles, keys, segments):
    """Their gradients of q as a launch allocates them, on 132 multiprocessors; four waves come close to the bound."""
    pytest.importorskip("triton")
    from gsa_kernels.attention import triton_gathered_backward as backward
    from gsa_kernels.attention.inputs import GradientInputs
    from gsa_kernels.attention.triton_gathered_forward import heads_per_program
    from gsa_kernels.key_lists.triton_reduce_keys import TileRows

    def tensor(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    walk = MagicMock()
    monkeypatch.setattr(backward, "_backward_kernel", walk)
    monkeypatch.setattr(backward, "_add_segments_kernel", MagicMock())
    monkeypatch.setattr(backward, "count_multiprocessors", lambda device: limits.MULTIPROCESSORS)
    q, k = (tensor(1, 65536, count, head_size) for count in heads)
    lists = MagicMock(queries=32, counts=tensor(1, 2048, dtype=torch.int32))
    members = heads_per_program(heads[0] // heads[1], 32, backward.backward_tiles(head_size, q.dtype).queries)
    rows = TileRows(0, tiles, tensor(tiles), tensor(tiles), tiles * keys)
    grad_q = torch.empty_like(q)
    backward._launch(
        GradientInputs(q, q, k, k, tensor(1), tensor(1)), lists, grad_q, members, rows, 0, tensor(1)
    )
    walk.__getitem__.assert_called_once_with((tiles * segments,))
    results = walk.__getitem__.return_value.call_args.args[12]
    taken = 0 if results is grad_q else results.nbytes
    assert (taken > 0) == (segments > 1)
    counted = limits.segments_bytes(keys, limits.MULTIPROCESSORS)
    assert taken <= counted
    assert taken > 0.9 * counted or segments < 13


def test_no_launch_in_segments_takes_more_than_is_counted():
    """By what it may have of programs, and one program of a tile's gradient of q."""
    pytest.importorskip("triton")
    from gsa_kernels.attention.triton_gathered_backward import backward_tiles, count_segments
    from gsa_kernels.attention.triton_gathered_forward import heads_per_program

    for keys in (8192, 20000, 131072, 2**20):
        most = max(
            programs * count_segments(programs, limits.MULTIPROCESSORS, keys)
            for programs in range(1, limits.MULTIPROCESSORS)
        )
        assert most * limits.SEGMENT_GRADIENT_BYTES <= limits.segments_bytes(keys, limits.MULTIPROCESSORS)
    for size in limits.HEAD_SIZES:
        for dtype in (torch.bfloat16, torch.float32):
            for queries in limits.TILE_SIZES:
                rows = queries * heads_per_program(64, queries, backward_tiles(size, dtype).queries)
                assert 4 * rows * size <= limits.SEGMENT_GRADIENT_BYTES
    assert limits.segments_bytes(8191, limits.MULTIPROCESSORS) == 0


def test_segments_are_counted_beyond_the_gradients_of_k_and_v(monkeypatch):
    """These are made when what segments leave has gone: with one head of 128 in bf16 512 bytes a token."""
    lengths, counted = (4096, 32768, 131072), {}
    for segments in (limits.segments_bytes, lambda *_: 0):
        monkeypatch.setattr(limits, "segments_bytes", segments)
        for length in lengths:
            options = ["gsa.attention_kernel=gathered", "train.micro_batch_size=1", "parallel.tensor=4"]
            options.append(f"train.seq_len_tokens={length}")
            config = load_config(GSA, options, world_size=8, need_data=False)
            taken = memory_selection.attending_bytes(config, sizes_of(config))
            counted.setdefault(length, []).append(taken)
    more = [counted[length][0] - counted[length][1] for length in lengths]
    assert more == [0, 4 * 132 * 64 * 1024 - 32768 * 512, 0]


def test_shared_lists_are_kept_turned_round():
    """A layer's rows and starts in int32, if the loss has all tiles at once: with 4096 keys a list it has not."""
    pytest.importorskip("triton")
    from gsa_kernels.key_lists.triton_block_lists import empty_block_lists
    from gsa_kernels.loss.triton_gathered_launch import bytes_per_tile
    from gsa_kernels.types import Geometry

    fast, geometry = GSA.with_name("gsa_fast_1.7b_32k.yaml"), Geometry(selection_block=32, local_window=64)
    for most_keys in (1024, 4096):
        config = load_config(fast, ["gsa.k_base=512", f"gsa.k_max={most_keys}", "parallel.context=1"])
        lists = empty_block_lists(1, 32768, most_keys, geometry, torch.device("meta"))
        tiles, rows = lists.counts.numel(), lists.counts.numel() * lists.max_count
        inputs = SimpleNamespace(rows=1, block_d=config.gsa.indexer_dim, lists=lists)
        at_once = tiles * bytes_per_tile(inputs, with_gradients=True) <= limits.GATHERED_LOSS_BYTES
        assert at_once == (most_keys == 1024)
        kept = memory_selection.turned_lists_bytes(config, config.phases[-1], sizes_of(config))
        assert kept == pytest.approx(at_once * 4 * (rows + lists.num_keys), rel=1e-3)
        assert memory_selection.turned_lists_bytes(config, config.phases[0], sizes_of(config)) == 0


def test_what_is_kept_of_indexers():
    """Of shared selections the loss behind attention keeps all queries, of which the first of a block are a view. The
    tables of the rotary embedding are one pair for all indexers."""
    shared = ["gsa.selection_block=32", "gsa.local_window=64"]
    first, mean = (
        estimate([*shared, f"gsa.selection_query={query}"]) for query in ("first", "previous_mean")
    )
    queries = 2 * 4 * 4096 * 4 * (64 + 1)
    assert first.activations - mean.activations == pytest.approx(24 * (queries - queries / 32))
    turned, plain = (estimate([f"gsa.indexer_rope={rope}"]).buffers for rope in ("on", "off"))
    assert turned - plain == 4 * 4096 * 64


def test_the_loss_behind_attention():
    def behind(*overrides, phase=-1):
        config = load_config(GSA, overrides, world_size=8, need_data=False)
        return memory_selection.fuses_indexer_loss(config, config.phases[phase], sizes_of(config))

    assert behind()
    assert not behind(phase=0)
    for override in (
        "gsa.indexer_loss_row_fraction=0.25",
        "gsa.attention_kernel=gathered",
        "parallel.tensor=2",
        "train.precision=fp32",
        "model.num_kv_heads=8",
    ):
        assert not behind(override), override
    short = ("train.seq_len_tokens=128", "gsa.indexer_loss_row_fraction=0.25")
    assert behind(*short)  # a quarter of one stretch of queries is all of it

    def bytes_of(sequences):
        config = load_config(GSA, [f"train.micro_batch_size={sequences}"], world_size=8, need_data=False)
        return memory_selection.fused_loss_bytes(config, sizes_of(config))

    # Four parts of the target in fp16; gradients of keys of tiles of 32 rows in bf16, of four heads' queries of
    # segments of 1024 keys in fp32. The chunk of 2^30 bytes has eight sequences.
    per_pair = 4 * 2 + 2 * 64 / 32 + 4 * 4 * 64 / 1024
    for sequences, counted in ((4, 4), (8, 8), (16, 8)):
        keys = 4 * sequences * 4096 * 64
        assert bytes_of(sequences) == keys + counted * 4096**2 * per_pair


def test_a_cuda_graph_holds_what_a_pass_needs():
    graphs = ["train.cuda_graphs=on", "parallel.overlap_grad_reduce=off"]
    without, with_graph = estimate(), estimate(graphs)
    assert without.graph == 0
    assert with_graph.graph == with_graph.activations + max(with_graph.working, with_graph.logits)
    assert with_graph.total == pytest.approx(without.total + with_graph.graph)
    assert estimate(graphs, phase=0).graph == 0  # the indexer alone learns
