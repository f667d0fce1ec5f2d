"""How work is divided over CTAs: the planner's constants, and the planner in plain Python as its oracle.

The device planner (`csrc/common/plan.cuh`) runs once a decode step and writes one range per CTA. Query rows of a
request (query_len * num_heads) are cut into blocks of ``rows``; a (request, block) pair is an *entry*. All entries in
a row, weighed by their keys in units plus a constant, are cut into contiguous ranges of equal weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

UNIT_TOKENS = 16
"""Keys in a unit: the granularity of cuts (`kUnit` of the kernels)."""

RANGE_FIELDS = 12
"""int32 fields of `CtaRange` in `csrc/common/work.cuh`."""


@dataclass(frozen=True)
class PlanCosts:
    """Weights of the planner, in units of `UNIT_TOKENS` keys.

    Attributes:
        entry: what an entry costs beside its keys (loading queries, joining, writing).
        min_cta: no range is made smaller than this, so that a short batch is cut into fewer pieces to reduce.
        min_split: a cut leaves at least this many units of an entry on both sides, or moves to its border.
    """

    entry: int
    min_cta: int
    min_split: int


def blocks_of_rows(num_heads: int, query_len: int, rows: int) -> int:
    """Number of row blocks of a request."""
    return -(-num_heads * query_len // rows)


def plan_reference(
    seq_lens: Sequence[int], query_lens: Sequence[int], *, num_heads: int, rows: int, num_ctas: int, costs: PlanCosts
) -> list[list[int]]:
    """The ranges that the device planner must produce.

    Args:
        seq_lens: keys of each request.
        query_lens: query tokens of each request.
        num_heads: query heads.
        rows: rows in a block.
        num_ctas: ranges to make.
        costs: the planner's weights.

    Returns:
        For each CTA: request, block and unit where its range starts, the first contributor of the entry there;
        the same where it ends (exclusive), with the last contributor.
    """
    units = [-(-max(length, 0) // UNIT_TOKENS) for length in seq_lens]
    entries = [
        (request, block)
        for request, query_len in enumerate(query_lens)
        for block in range(blocks_of_rows(num_heads, query_len, rows))
    ]
    weights = [units[request] + costs.entry for request, _ in entries]
    share = max(-(-sum(weights) // num_ctas), costs.min_cta, 1)

    end = (len(seq_lens), 0, 0)
    starts = [(request, block, 0) for request, block in entries] + [end]
    cuts = []
    for cta in range(num_ctas + 1):
        position, index = cta * share, 0
        while index < len(entries) and position >= weights[index]:
            position -= weights[index]
            index += 1
        if index == len(entries):
            cuts.append(end)
            continue
        request, block = entries[index]
        unit = max(position - costs.entry, 0)
        if unit < costs.min_split:
            unit = 0
        if unit and units[request] - unit < costs.min_split:
            # the border behind a request's last block is written as (request + 1, 0), whether it has queries or not
            last = index + 1 == len(entries) or entries[index + 1][0] != request
            cuts.append((request + 1, 0, 0) if last else starts[index + 1])
        else:
            cuts.append((request, block, unit))

    ranges = []
    for cta in range(num_ctas):
        begin, stop = cuts[cta], cuts[cta + 1]
        first, last = cta, cta
        if begin[2]:
            first = next(c for c in range(cta - 1, -1, -1) if cuts[c][:2] != begin[:2] or cuts[c][2] == 0)
        if stop[2]:
            last = next(c for c in range(cta + 1, num_ctas) if cuts[c + 1][:2] != stop[:2] or cuts[c + 1][2] == 0)
        ranges.append([*begin, first, *stop, last])
    return ranges
