"""Fields of the selection that must fit each other, and the layout."""

from __future__ import annotations

import math

from gsa_train.config.layout_checks import chunk_in_words, undivided_chunk
from gsa_train.config.load import problem_line
from gsa_train.config.sections import Config


def check_selection(config: Config) -> list[str]:
    """A line for each mistake."""
    gsa, lines = config.gsa, []
    if gsa.k_min > gsa.k_base:
        lines.append(
            problem_line(
                "gsa.k_min", gsa.k_min, f"above gsa.k_base = {gsa.k_base}", "need k_min <= k_base <= k_max"
            )
        )
    if gsa.k_max < gsa.k_base:
        lines.append(
            problem_line(
                "gsa.k_max", gsa.k_max, f"below gsa.k_base = {gsa.k_base}", "need k_min <= k_base <= k_max"
            )
        )
    if gsa.selection_block > 1 and gsa.local_window < gsa.selection_block:
        lines.append(
            problem_line(
                "gsa.local_window",
                gsa.local_window,
                f"below gsa.selection_block = {gsa.selection_block}, so queries would miss the keys of their own block",
                f"set gsa.local_window to {gsa.selection_block} or more",
            )
        )
    if gsa.selection_query == "previous_mean":
        lines += _check_previous_mean(config)
    if gsa.indexer_pool > 1:
        lines += _check_pool(config)
    if gsa.reuse_teacher == "group":
        lines += _check_group_teacher(config)
    share = gsa.indexer_loss_row_fraction
    # To one percent, as `gsa_kernels.sampling` has it: 0.3333 is a third.
    if not 0 < share <= 1 or math.isinf(1 / share) or abs(share * round(1 / share) - 1) > 0.01:
        lines.append(
            problem_line(
                "gsa.indexer_loss_row_fraction",
                share,
                "not 1 / n for a whole n",
                "give 1, which takes every query, 0.5, 0.3333, 0.25, ...",
            )
        )
    beta = gsa.indexer_temperature
    if beta != "learned" and (isinstance(beta, str) or beta <= 0):
        lines.append(
            problem_line("gsa.indexer_temperature", beta, "neither above 0 nor learned", "1.0 is the paper's")
        )
    if undivided := undivided_chunk(config, gsa.selection_reuse):
        lines.append(
            problem_line(
                "gsa.selection_reuse",
                gsa.selection_reuse,
                f"does not divide the {undivided} layers of {chunk_in_words(config)}, and a group may not cross "
                "from one to the next",
                f"choose a divisor of {undivided}",
            )
        )
    return lines


def _check_previous_mean(config: Config) -> list[str]:
    field, lines = "gsa.selection_query", []
    if config.gsa.selection_block == 1:
        wrong, remedy = "there are no blocks with gsa.selection_block = 1", "set it to first, or give a block"
        lines.append(problem_line(field, "previous_mean", wrong, remedy))
    if config.parallel.context > 1:
        wrong = f"the block before may be another rank's, with parallel.context = {config.parallel.context}"
        lines.append(problem_line(field, "previous_mean", wrong, "set it to first, or parallel.context to 1"))
    return lines


def _check_pool(config: Config) -> list[str]:
    gsa, field, lines = config.gsa, "gsa.indexer_pool", []
    if gsa.indexer_pool > gsa.k_min:
        wrong = f"above gsa.k_min = {gsa.k_min}, so that a query could select no group of keys"
        lines.append(
            problem_line(field, gsa.indexer_pool, wrong, f"set gsa.k_min to {gsa.indexer_pool} or more")
        )
    if gsa.selection_block > 1:
        wrong = f"groups of keys are for queries that select alone, and gsa.selection_block = {gsa.selection_block}"
        lines.append(problem_line(field, gsa.indexer_pool, wrong, "set one of them to 1"))
    if config.parallel.context > 1:
        wrong = f"a group's keys may be on two ranks, with parallel.context = {config.parallel.context}"
        lines.append(problem_line(field, gsa.indexer_pool, wrong, "set one of them to 1"))
    return lines


def _check_group_teacher(config: Config) -> list[str]:
    field, lines = "gsa.reuse_teacher", []
    if config.gsa.selection_reuse == 1:
        wrong = "there are no groups with gsa.selection_reuse = 1"
        lines.append(problem_line(field, "group", wrong, "set it to leader, or give a group"))
    if config.train.recompute != "none":
        wrong = f"recomputed layers come one by one, and train.recompute = {config.train.recompute}"
        lines.append(problem_line(field, "group", wrong, "set it to leader, or train.recompute to none"))
    if config.parallel.strategy == "deepspeed":
        wrong = "the loss reads the indexer's weights in another layer, and parallel.strategy = deepspeed"
        lines.append(
            problem_line(field, "group", wrong, "set it to leader, or parallel.strategy to megatron")
        )
    return lines
