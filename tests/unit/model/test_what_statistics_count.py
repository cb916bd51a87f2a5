"""Compares the queries in each statistic with loops over single tokens."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

from gsa_data.pack import FILLER, document_starts
from gsa_kernels.packed_mask import pack_mask, unpack_mask
from gsa_train.config import Config, PhaseConfig
from gsa_train.data.batches import MicroBatch, to_micro_batch
from gsa_train.metrics.record import attention_metrics
from gsa_train.model.gates import gate_bins, gate_statistics
from gsa_train.model.probes import attention_statistics, measured_queries, query_sample
from gsa_train.model.probes.attention_statistics import log_sums, sink_statistics, top_key_overlap
from gsa_train.model.probes.massive_activations import largest_activation, token_kinds
from gsa_train.model.probes.measured_queries import SparseQueries
from gsa_train.model.probes.stats import (
    ENDS_DOCUMENT,
    ORDINARY,
    POSITIONS,
    STARTS_DOCUMENT,
    LayerStats,
    Statistics,
    Vector,
)
from gsa_train.phases import enter_phase
from helpers.single_rank import (
    EOS,
    SPARSE,
    WARM_UP,
    averages,
    read_stats,
    single_rank,
    step_gradients,
    tiny_config,
    tiny_model,
    token_losses,
)

LENGTH = 24
CPU = torch.device("cpu")


def sinks(
    q: torch.Tensor, k: torch.Tensor, attended: torch.Tensor, queries: SparseQueries, first_head: int
) -> Statistics:
    masks = queries.position_masks & pack_mask(attended)[:, None]
    return sink_statistics(log_sums(q, k, masks, "reference"), queries, first_head)


def read(stats: LayerStats) -> dict[str, list[Any]]:
    single_rank()
    return stats.read()


def test_probability_by_position_matches_the_loops() -> None:
    generator = torch.Generator().manual_seed(5)
    q, k = torch.randn(2, 40, 4, 8, generator=generator), torch.randn(2, 40, 2, 8, generator=generator)
    ids = torch.tensor([[0] * 23 + [1] * 17, [0] + [1] * 39])
    starts = document_starts(ids.int())
    rows = torch.tensor([0, 7, 22, 23, 39])
    attended = torch.rand(2, len(rows), 40, generator=generator) < 0.6
    visible = (torch.arange(40) <= rows[:, None])[None] & (torch.arange(40) >= starts[:, rows, None])
    attended = (attended | (torch.arange(40) == rows[:, None])) & visible
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_queries, "LEAST_KEYS", 8)
        found = sinks(q[:, rows], k, attended, SparseQueries(rows, starts[:, rows], 40), first_head=4)
    expected = torch.zeros(4, len(POSITIONS), dtype=torch.float64)
    count = 0
    for b in range(2):
        for i, t in enumerate(rows.tolist()):
            start = int(starts[b, t])
            if t + 1 - start < 8:
                continue
            count += 1
            for head in range(4):
                keys = [s for s in range(40) if attended[b, i, s]]
                weights = [math.exp(float(q[b, t, head] @ k[b, s, head // 2]) / 8**0.5) for s in keys]
                for s, weight in zip(keys, weights, strict=True):
                    group = max(g for g, first in enumerate(POSITIONS) if first <= s - start)
                    expected[head, group] += weight / math.fsum(weights)
    heads, positions = found.vectors["head_first_token_attention"], found.vectors["sink_by_position"]
    assert heads.first == 4
    assert heads.counts.tolist() == [count] * 4 == [6] * 4
    torch.testing.assert_close(heads.sums.double(), expected[:, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(positions.sums.double(), expected.sum(0), rtol=1e-5, atol=1e-5)
    assert positions.counts.tolist() == [4 * count] * len(POSITIONS)


def test_overlap_with_the_top_keys_matches_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(6)
    q, k = torch.randn(2, 40, 4, 8, generator=generator), torch.randn(2, 40, 2, 8, generator=generator)
    starts, rows = document_starts(torch.tensor([[0] * 23 + [1] * 17, [0] + [1] * 39]).int()), [7, 22, 23, 39]
    queries = SparseQueries(torch.tensor(rows), starts[:, rows], 40)
    selected = (torch.rand(2, len(rows), 40, generator=generator) < 0.4) & queries.causal
    selected[..., rows] |= torch.eye(len(rows), dtype=torch.bool)
    tp_group = single_rank().groups.tp
    found = top_key_overlap(q[:, rows], k, selected, queries.causal, int(selected.sum(-1).max()), tp_group)

    def share(probs: dict[int, float], chosen: set[int]) -> float:
        return len(chosen & set(sorted(probs, key=probs.__getitem__)[-len(chosen) :])) / len(chosen)

    for b, (i, t) in itertools.product(range(2), enumerate(rows)):
        chosen, keys = set(selected[b, i].nonzero()[:, 0].tolist()), range(int(starts[b, t]), t + 1)
        probs = [(q[b, t, h] @ k[b, keys.start : t + 1, h // 2].T / 8**0.5).softmax(0) for h in range(4)]
        of_heads = [share(dict(zip(keys, each.tolist(), strict=True)), chosen) for each in probs]
        assert found.of_heads[b, i].tolist() == pytest.approx(of_heads)
        of_mean = share(dict(zip(keys, sum(probs).tolist(), strict=True)), chosen)
        assert found.of_mean[b, i].tolist() == pytest.approx([of_mean])
        recall = sum(sum(probs)[key - keys.start].item() for key in chosen) / 4
        assert found.recall_of_mean[b, i].tolist() == pytest.approx([recall])
    assert 0.2 < found.of_heads.mean() < 0.8
    monkeypatch.setattr(attention_statistics, "MOST_PROBABILITIES", 1)  # one key-value head at a time
    again = top_key_overlap(q[:, rows], k, selected, queries.causal, 40, tp_group)
    torch.testing.assert_close(again, found)


def batch_of(documents: list[int], config: Config, filler: int = 0) -> MicroBatch:
    """Create one sequence of documents of these lengths, including EOS, and filler."""
    generator = torch.Generator().manual_seed(len(documents))
    blocks = torch.randint(
        1, config.model.vocab_size, (1, LENGTH + 1), generator=generator, dtype=torch.int32
    )
    ends = torch.tensor(documents).cumsum(0) - 1
    blocks[0, ends[ends <= LENGTH]] = EOS
    if filler:
        blocks[0, LENGTH + 1 - filler :] = FILLER
    return to_micro_batch(blocks, EOS, attend_across_documents=False)


def measured(config: Config, phase: PhaseConfig, batches: list[MicroBatch]) -> dict[str, list[float]]:
    model = tiny_model(config, variance_ema=0.02)
    enter_phase(model, phase)
    for batch in batches:
        token_losses(model, batch, measuring=True)
    return read_stats(model)


@pytest.fixture
def one_sequence(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(query_sample, "SPARSE_EVERY", 1)
    monkeypatch.setattr(query_sample, "GROUP", 4)
    return tiny_config(
        gsa={"k_base": 3, "k_min": 2, "k_max": 4},
        train={"seq_len_tokens": LENGTH, "micro_batch_size": 1, "global_batch_size": 1},
    )


@pytest.mark.parametrize("phase", [SPARSE, WARM_UP], ids=lambda phase: phase.name)
def test_filler_changes_no_statistic_of_choices(one_sequence: Config, phase: PhaseConfig) -> None:
    """A document of 17 tokens, followed by 7 tokens of filler, is compared with the same document without filler."""

    filled = batch_of([17], one_sequence, filler=8)
    assert filled.causal_keys()[0].tolist() == [*range(1, 18), *[1] * 7]
    alone = MicroBatch(
        *(getattr(filled, name)[:, :17] for name in ("tokens", "labels", "document_ids", "loss_mask"))
    )
    with_filler, without = (measured(one_sequence, phase, [batch]) for batch in (filled, alone))
    costs = {"selected_keys", "sequence_start_attention", "max_activation"}
    gates = {name for name in without if "gate" in name}
    first = {"k_by_position/0", "max_activation_dimension", "max_activation_token"}
    compared = without.keys() - costs - gates - first
    assert {"indexer_kl", "variance", "recall", "k_mean", "dense_query_share", "adjacent_overlap"} <= compared
    assert {"union_ratio_32", "random_recall", "indexer_saturated", "max_attention_logit"} <= compared
    for name in compared:
        assert with_filler[name] == pytest.approx(without[name], rel=1e-5), name
    assert with_filler["selected_keys"] != without["selected_keys"]


def test_neighbours_of_two_documents_and_queries_without_a_choice_are_no_pairs(one_sequence: Config) -> None:
    """The expected values are loops over the first layer's selections."""
    model = tiny_model(one_sequence, variance_ema=0.02)
    enter_phase(model, SPARSE)
    kept: list[torch.Tensor] = []
    over_chunks = model.attentions[0].over_chunks
    select = over_chunks.select

    def recorded(*arguments: Any) -> Any:
        kept.append(unpack_mask((selections := select(*arguments))[0].packed_mask, LENGTH))
        return selections

    over_chunks.select = recorded  # type: ignore[method-assign]
    batch = batch_of([9, 3, 12], one_sequence)
    token_losses(model, batch, measuring=True)
    stats, (selection,) = read_stats(model), kept
    sets = [set(row.nonzero()[:, 0].tolist()) for row in selection[0]]
    ids, visible = batch.document_ids[0].tolist(), batch.causal_keys()[0].tolist()
    chooses = [len(chosen) < seen for chosen, seen in zip(sets, visible, strict=True)]
    assert 0 < sum(chooses) < LENGTH
    assert max(map(len, sets)) <= one_sequence.gsa.most_selected_keys
    overlaps = [
        len(sets[t] & sets[t - 1]) / len(sets[t])
        for t in range(1, LENGTH)
        if chooses[t] and chooses[t - 1] and ids[t] == ids[t - 1]
    ]
    assert stats["adjacent_overlap"][0] == pytest.approx(math.fsum(overlaps) / len(overlaps), rel=1e-6)
    groups = [range(t, t + 4) for t in range(0, LENGTH, 4)]
    groups = [each for each in groups if all(chooses[t] for t in each) and ids[each[0]] == ids[each[-1]]]
    assert groups
    ratios = [
        len(set().union(*(sets[t] for t in each))) * 4 / sum(len(sets[t]) for t in each) for each in groups
    ]
    assert stats["union_ratio_32"][0] == pytest.approx(math.fsum(ratios) / len(ratios), rel=1e-6)
    random = [len(sets[t]) / visible[t] for t in range(LENGTH) if chooses[t]]
    assert stats["random_recall"][0] == pytest.approx(math.fsum(random) / len(random), rel=1e-6)
    counted = [t for t in range(LENGTH) if visible[t] >= 2]
    dense = sum(not chooses[t] for t in counted) / len(counted)
    assert stats["dense_query_share"][0] == pytest.approx(dense, rel=1e-6)
    budgets = {0: [1.0] * 3}
    for t in range(LENGTH):
        if visible[t] > 1:
            budgets.setdefault(4 ** int(math.log(visible[t] - 1, 4) + 1e-9), []).append(len(sets[t]))
    for label, first in (("0", 0), ("1-3", 1), ("4-15", 4)):
        mean = sum(budgets[first]) / len(budgets[first])
        assert stats[f"k_by_position/{label}"][0] == pytest.approx(mean, rel=1e-6), label


def test_the_average_and_the_loss_are_means_over_the_queries_that_count(one_sequence: Config) -> None:
    """Two micro-batches have one and eight documents. The step's mean covers all rows, not the micro-batches' means."""
    config = tiny_config(
        gsa={"k_base": 3, "k_min": 2, "k_max": 4, "variance_ema_decay": 0.75},
        train={"seq_len_tokens": LENGTH, "micro_batch_size": 1, "global_batch_size": 2},
    )
    batches = [batch_of([LENGTH + 1], config), batch_of([3] * 8, config)]
    counts = [int((batch.causal_keys() >= 2).sum()) for batch in batches]
    assert counts == [23, 16]
    alone = []
    for batch in batches:
        one = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_size=1))
        model = tiny_model(one, variance_ema=0.02)
        _, gradients = step_gradients(model, SPARSE, [batch], one, measures=True)
        alone.append((averages(model), gradients, read_stats(model)))
    model = tiny_model(config, variance_ema=0.02)
    _, gradients = step_gradients(model, SPARSE, batches, config, measures=True)
    stats = read_stats(model)
    for layer in range(2):
        for found, each in (
            (stats["variance"], [of[2]["variance"] for of in alone]),
            (stats["indexer_kl"], [of[2]["indexer_kl"] for of in alone]),
            (averages(model), [of[0] for of in alone]),
        ):
            total = sum(count * values[layer] for count, values in zip(counts, each, strict=True))
            mean = total / sum(counts)
            assert found[layer] == pytest.approx(mean, rel=1e-5)
    for name, gradient in gradients.items():
        if ".indexer." in name:
            mean = sum(count * of[1][name] for count, of in zip(counts, alone, strict=True)) / sum(counts)
            torch.testing.assert_close(gradient, mean, rtol=1e-4, atol=1e-7, msg=name)


def test_gates_in_bins_match_the_loops() -> None:
    config = tiny_config()
    model = tiny_model(config)
    logits = 3 * torch.randn(5, 2, 24, generator=torch.Generator().manual_seed(1))
    logits[0, 0, 0] = math.nan
    found = gate_statistics(logits, model.mcore_config, gate_bins(logits.device))
    opened = logits.sigmoid().unflatten(-1, (2, 12))
    for name, gate in (("value", opened[..., :4]), ("output", opened[..., 4:])):
        counts = [0] * 10
        for value in gate.flatten().tolist():
            counts[9 if math.isnan(value) else min(int(value * 10), 9)] += 1
        vector = found.vectors[f"{name}_gate_histogram"]
        assert vector.sums.sum(0).tolist() == counts
        stats = LayerStats(1, torch.device("cpu"))
        stats.record(0, found)
        stats.sum_up()
        first = stats._entries[f"{name}_gate_histogram"].start
        assert stats._vectors[0, :, first : first + 10].tolist() == [counts, [gate.numel()] * 10]
        for what, place in (("low", 0), ("high", 9)):
            assert found.means[f"{name}_gate_{what}"].sum() == counts[place]
            assert found.counts[f"{name}_gate_{what}"] == gate.numel()


def test_the_largest_activation_and_its_place() -> None:
    hidden = torch.randn(7, 2, 5, generator=torch.Generator().manual_seed(2))
    hidden[4, 1, 3] = -9.0
    hidden[2, 0, 1] = 8.5
    found = largest_activation(hidden)
    assert [float(each) for each in found] == [9.0, 4 * 2 + 1, 3]
    hidden[5, 0, 2] = math.nan
    found = largest_activation(hidden)
    assert found.value.isnan()
    assert (int(found.token), int(found.dimension)) == (5 * 2, 2)


def test_first_and_last_tokens_of_documents() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 2, 2, 2, 2, 2]])
    s, e, o = STARTS_DOCUMENT, ENDS_DOCUMENT, ORDINARY
    assert token_kinds(torch.arange(7), ids).t().tolist() == [[s, o, e, s, e, s, o], [s, s, s, o, o, o, o]]
    assert token_kinds(torch.tensor([3, 4, 0]), ids).t().tolist() == [[s, e, s], [o, o, s]]
    assert token_kinds(torch.arange(3), None).t().tolist() == [[s, o, o]]


def test_the_record_has_vectors_as_dicts_and_heads_as_a_table() -> None:
    stats = LayerStats(3, CPU, 2)
    for layer, sums in ((0, [3.0, 1.0]), (2, [1.0, 1.0])):
        of_heads = Vector(torch.tensor(sums), torch.tensor([4, 4]))
        of_positions = Vector(torch.tensor([1.0, 2.0]), torch.tensor([4, 8 * (layer + 1)]), first=1)
        stats.record(
            layer,
            Statistics(vectors={"head_first_token_attention": of_heads, "sink_by_position": of_positions}),
        )
    for layer, (value, dimension) in enumerate(((5.0, 1), (9.0, 4), (7.0, 2))):
        stats.maximum_at(layer, *(torch.tensor(each) for each in (value, dimension, STARTS_DOCUMENT)))
    stats.maximum_at(1, torch.tensor(8.0), torch.tensor(200_000), torch.tensor(0))  # the largest one counts
    record = attention_metrics(read(stats))
    assert record["head_first_token_attention"][::2] == [[0.75, 0.25], [0.25, 0.25]]
    assert all(math.isnan(value) for value in record["head_first_token_attention"][1])
    assert record["layer_first_token_attention_spread"][::2] == [0.25, 0.0]
    assert record["first_token_attention_spread"] == 0.125
    assert record["sink_by_position"] == {"1-3": 0.25, "4-15": (2 / 8 + 2 / 24) / 2}
    assert record["max_activation"] == 9.0
    assert (record["max_activation_dimension"], record["max_activation_token"]) == (4, STARTS_DOCUMENT)
    assert record["layer_max_activation_dimension"] == [1, 4, 2]
    nothing = torch.full((2,), math.nan)
    for layer in (0, 2):  # as in a step with non-finite numbers
        stats.record(
            layer, Statistics(vectors={"head_first_token_attention": Vector(nothing, torch.ones(2))})
        )
        stats.maximum_at(layer, nothing[0], torch.tensor(3), torch.tensor(0))
    record = attention_metrics(read(stats))
    assert math.isnan(record["first_token_attention_spread"])
    assert math.isnan(record["max_activation"])
    assert record["layer_max_activation_dimension"] == [3, 4, 3]
    assert record["sink_by_position"]["1-3"] == 0.25
