"""Times a selection that blocks of queries share, on one CUDA device, and checks each selection.

    python benchmarks/bench_block.py [--lengths 8192 32768 131072] [--blocks 32] [--chunk-mib 512]
                                        [--k-max 4096]

For each length and block size b, with a window of 2 b, it times the parts: scores of the L / b rows, their budget and
top-k, and the key lists of all queries. It also times all of these in one call, `select_block_lists`, from the host and
as a CUDA graph. Up to 32768 tokens it then times the loss of the indexer warm-up: the target, of the 1.7B model's
attention, and the loss with its gradients.
"""

import sys

import harness
import torch

from gsa_kernels.attention.op import masked_attention
from gsa_kernels.attention.triton_block_probs import block_sum_probs_rows
from gsa_kernels.indexer.triton_scores import write_scores
from gsa_kernels.key_lists.triton_block_lists import empty_block_lists, fill_block_lists
from gsa_kernels.loss.op import Attended, Target, masked_indexer_loss
from gsa_kernels.packed_mask import unpack_mask
from gsa_kernels.reference import adaptive_budget, causal_mask, select_top_k
from gsa_kernels.sampling import SampledRows
from gsa_kernels.selection.block_op import select_block_lists
from gsa_kernels.selection.op import Selector, new_outputs, score_rows, select_chunk, select_keys
from gsa_kernels.selection.score_chunks import chunk_view
from gsa_kernels.types import BudgetRule, Geometry, Indexer, Selection

HEADS, DIM = 4, 64
K_BASE, K_MIN = 2048, 256
ATTENTION_HEADS, KV_HEADS, HEAD_DIM = 16, 4, 128
AIMS_MS = {32768: 0.25, 131072: 2.0}  # for a whole selection, b = 32


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--blocks", type=int, nargs="+", default=[32])
    parser.add_argument("--chunk-mib", type=int, nargs="+", default=[512])
    parser.add_argument("--k-max", type=int, default=4096)
    args = parser.parse_args()
    harness.require_cuda()
    report = harness.Report("bench_block", args)
    for block in args.blocks:
        for length in args.lengths:
            for mib in args.chunk_mib:
                measure(report, length, block, args.k_max, mib * 2**20)
    for block in args.blocks:
        for length in args.lengths:
            if length <= 32768:
                measure_loss(report, length, block)
    return report.finish()


def measure(report: harness.Report, length: int, block: int, k_max: int, chunk_bytes: int) -> None:
    generator = torch.Generator("cuda").manual_seed(length)
    blocks, window = -(-length // block), 2 * block

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(torch.bfloat16)

    # Keys have a larger scale than queries: logits have a standard deviation of 1.5, and sigmoids do not saturate.
    indexer = Indexer(draw(1, blocks, HEADS, DIM), draw(1, length, DIM) * 1.5, draw(1, blocks, HEADS))
    rule, geometry = BudgetRule(K_BASE, K_MIN, k_max), Geometry(selection_block=block, local_window=window)

    def select(ema: torch.Tensor) -> Selection:
        return select_block_lists(indexer, rule, ema, geometry, row_chunk_bytes=chunk_bytes)

    ema = select(torch.ones((), device="cuda")).variance.mean()
    selection = select(ema)
    top_k = select_keys(indexer, rule, ema, geometry, row_chunk_bytes=chunk_bytes)
    packed_top_k = top_k.packed_mask
    assert packed_top_k is not None
    selector = Selector(indexer, rule, ema, geometry, chunk_bytes, None)
    scored, chunks = selector.inputs, selector.chunks
    outputs = new_outputs(scored)
    views = [(rows, chunk_view(selector.buffer, scored, rows)) for rows in chunks]

    def scores_pass() -> None:
        for rows, view in views:
            write_scores(scored, rows.start, rows.stop, view)

    def lists_pass() -> None:
        lists = empty_block_lists(1, length, k_max, geometry, packed_top_k.device)
        fill_block_lists(packed_top_k, range(blocks), lists, geometry)

    def selection_pass() -> None:
        # The buffer holds values of earlier chunks. They are overwritten, and they are scores in any case.
        for rows, view in views:
            select_chunk(selector.criteria, view, rows, outputs)

    candidates = {
        "scores": scores_pass,
        "selection": selection_pass,
        "lists": lists_pass,
        "all": lambda: select(ema),
        "graph": harness.capture(lambda: select(ema)),
    }
    times = harness.measure(candidates)
    report.row(
        length=length,
        block=block,
        chunk_mib=chunk_bytes // 2**20,
        **{f"{name}_ms": timed.ms for name, timed in times.items()},
        k_max=k_max,
        mean_k=selection.budget.float().mean().item(),
    )
    if block == 32 and length in AIMS_MS:
        report.bar(f"selection of {length} tokens, ms", times["graph"].ms, at_most=AIMS_MS[length])
    if not is_correct(indexer, top_k, ema, geometry, k_max):
        report.fail(f"selection of {length} tokens in blocks of {block}")


def measure_loss(report: harness.Report, length: int, block: int) -> None:
    generator = torch.Generator("cuda").manual_seed(length)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(torch.bfloat16)

    q, k = draw(1, length, ATTENTION_HEADS, HEAD_DIM), draw(1, length, KV_HEADS, HEAD_DIM)
    _, lse = masked_attention(q, k, k, None)
    blocks = -(-length // block)
    leaves = [draw(1, blocks, HEADS, DIM), draw(1, length, DIM), draw(1, blocks, HEADS)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    rows = SampledRows(0, blocks)
    geometry = Geometry(selection_block=block, local_window=block)
    target = block_sum_probs_rows(q, k, lse, rows, geometry)

    def loss() -> None:
        def target_rows(chunk: SampledRows) -> torch.Tensor:
            return target[:, chunk.start : chunk.start + chunk.count]

        indexer, attended = Indexer(leaves[0], leaves[1], leaves[2]), Attended(geometry=geometry)
        total, _ = masked_indexer_loss(indexer, Target(target_rows), attended)
        torch.autograd.grad(total, leaves)

    times = harness.measure(
        {
            "target": lambda: block_sum_probs_rows(q, k, lse, rows, geometry),
            "loss": loss,
        }
    )
    report.row(length=length, block=block, target_ms=times["target"].ms, loss_ms=times["loss"].ms)


def is_correct(
    indexer: Indexer, top_k: Selection, ema: torch.Tensor, geometry: Geometry, k_max: int, sample: int = 32
) -> bool:
    """Check that budget and top-k equal the budget and top-k of the reference. The check covers some rows at the start,
    in the middle and at the end."""
    blocks, length, block = indexer.queries.shape[1], indexer.keys.shape[1], geometry.selection_block
    assert top_k.packed_mask is not None
    sample = min(sample, blocks)
    for start in (0, (blocks - sample) // 2, blocks - sample):
        rows = torch.arange(start, start + sample, device="cuda")
        visible = causal_mask(length, query_positions=rows * block)
        scores = score_rows(indexer, range(start, start + sample), geometry)
        scores = torch.where(visible, scores, 0)
        budget = adaptive_budget(
            top_k.variance[:, rows],
            ema,
            visible.sum(-1),
            k_base=K_BASE,
            k_min=K_MIN,
            k_max=k_max,
            adaptive_k="inverse",
        )
        wanted = select_top_k(scores, visible, budget)
        found = unpack_mask(top_k.packed_mask[:, rows], length)
        if not (torch.equal(budget.int(), top_k.budget[:, rows]) and torch.equal(wanted, found)):
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
