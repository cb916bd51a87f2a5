"""Tests a dry run's memory where no step is traced; test_memory_trace.py compares it with real steps."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from gsa_kernels import limits
from gsa_train.config import load_config
from gsa_train.model.flops import count_parameters
from gsa_train.planning.memory import selection as memory_selection
from gsa_train.planning.memory.estimate import estimate_memory
from gsa_train.planning.memory.sizes import sizes_of

GSA = Path(__file__).parents[2] / "configs" / "gsa_1.7b.yaml"


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (3, 80), (4, 64), (6, 40), (7, 36), (2, 8)])
def test_partial_gradients_match_the_loss(monkeypatch, heads, dim, dtype):
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
    """A launch allocates their gradients of q on 132 multiprocessors; four waves come close to the bound."""
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
    lists = MagicMock(counts=tensor(1, 2048, dtype=torch.int32))
    members = heads_per_program(heads[0] // heads[1], backward.backward_tiles(head_size, q.dtype).queries)
    rows = TileRows(0, tiles, tensor(tiles), tensor(tiles), tiles * keys)
    grad_q = torch.empty_like(q)
    backward._launch(
        GradientInputs(q, q, k, k, tensor(1), tensor(1)), lists, grad_q, members, rows, 0, tensor(1)
    )
    walk.__getitem__.assert_called_once_with((tiles * segments,))
    results = walk.__getitem__.return_value.call_args.args[10]
    taken = 0 if results is grad_q else results.nbytes
    assert (taken > 0) == (segments > 1)
    counted = limits.segments_bytes(keys, limits.MULTIPROCESSORS)
    assert taken <= counted
    assert taken > 0.9 * counted or segments < 13


def test_no_launch_in_segments_takes_more_than_is_counted():
    """The bound follows from the number of programs, and one program of a tile's gradient of q."""
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
            rows = limits.TILE_QUERIES * heads_per_program(64, backward_tiles(size, dtype).queries)
            assert 4 * rows * size <= limits.SEGMENT_GRADIENT_BYTES
    assert limits.segments_bytes(8191, limits.MULTIPROCESSORS) == 0


def test_segments_are_counted_beyond_the_gradients_of_k_and_v(monkeypatch):
    """Programs that share a key list store gradients in segments. The backward pass frees this memory before it
    allocates the gradients of k and v, which take 512 bytes per token with one bf16 head of 128."""
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


def test_which_phases_fuse_the_indexer_loss_into_attention():
    def fused(*overrides, phase=-1):
        config = load_config(GSA, overrides, world_size=8, need_data=False)
        return memory_selection.fuses_indexer_loss(config, config.phases[phase], sizes_of(config))

    assert fused()
    assert not fused(phase=0)
    for override in (
        "gsa.indexer_loss_row_fraction=0.25",
        "gsa.attention_kernel=gathered",
        "parallel.tensor=2",
        "train.precision=fp32",
        "model.num_kv_heads=8",
    ):
        assert not fused(override), override
    short = ("train.seq_len_tokens=128", "gsa.indexer_loss_row_fraction=0.25")
    assert fused(*short)  # a quarter of one stretch of queries is all of it


def test_a_cuda_graph_holds_what_a_pass_needs():
    graphs = ["train.cuda_graphs=on", "parallel.overlap_grad_reduce=off"]
    without, with_graph = estimate(), estimate(graphs)
    assert without.graph == 0
    assert with_graph.graph == with_graph.activations + max(with_graph.working, with_graph.logits)
    assert with_graph.total == pytest.approx(without.total + with_graph.graph)
    assert estimate(graphs, phase=0).graph == 0  # only the indexer trains
