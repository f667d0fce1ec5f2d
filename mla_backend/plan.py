"""How work is divided over CTAs: the planner's constants, and the planner in plain Python as its oracle.

The device planner (`csrc/common/plan.cuh`) runs once a decode step and writes one range per CTA. Query rows
of a request (query_len * num_heads) are cut into blocks of ``rows``; a (request, block) pair is an *entry*.
There are two ways to cut:

- *Shares*: all entries in a row, weighed by their keys in units plus a constant, are cut into ranges of
  equal weight. This balances any batch, but a range may hold the end of one entry and the start of the next,
  and both have to be written as partials and reduced.
- *Equal parts*: every entry is cut into the same number of parts, one per CTA. Taken if the longest entry's
  part is no larger than a share: the other CTAs idle a little, but a CTA holds one part of one entry, and
  none is reduced at all where there is about one entry per CTA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

UNIT_TOKENS = 16
"""Keys in a unit: the granularity of cuts (`kUnit` of the kernels)."""

RANGE_FIELDS = 12
"""int32 fields of `CtaRange` in `csrc/common/work.cuh`."""


PART_UNITS = 4
"""Equal parts are multiples of this many units: whole tiles of the kernels."""


@dataclass(frozen=True)
class PlanCosts:
    """Weights of the planner, in units of `UNIT_TOKENS` keys.

    Attributes:
        entry: what an entry costs beside its keys (loading queries, joining, writing, reducing).
        min_part: no share of work is smaller than this, so that a short batch is cut into fewer pieces to
            reduce.
        min_split: a cut leaves at least this many units of an entry on both sides, or moves to its border;
            `NEVER` keeps every entry whole.
    """

    entry: int
    min_part: int
    min_split: int

    NEVER: ClassVar[int] = 1 << 30


def blocks_of_rows(num_heads: int, query_len: int, rows: int) -> int:
    """Number of row blocks of a request."""
    return -(-num_heads * query_len // rows)


def plan_reference(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    num_heads: int,
    rows: int,
    num_ctas: int,
    costs: PlanCosts,
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
        For each CTA: request, block and unit where its range starts, the first contributor of the entry
        there; the same where it ends (exclusive), with the last contributor; and 1 if there are two CTAs for
        each entry and this one shares its with CTA ``cta ^ 1``.
    """
    units = [-(-max(length, 0) // UNIT_TOKENS) for length in seq_lens]
    entries = [
        (request, block)
        for request, query_len in enumerate(query_lens)
        for block in range(blocks_of_rows(num_heads, query_len, rows))
    ]
    weights = [units[request] + costs.entry for request, _ in entries]
    share = max(-(-sum(weights) // num_ctas), costs.min_part + costs.entry)
    longest = max((units[request] for request, _ in entries), default=0)
    smallest = max(costs.min_part, costs.min_split)
    parts = min(num_ctas // len(entries), -(-longest // smallest)) if entries else 0

    def whole_tiles(length: int) -> int:
        return -(-length // PART_UNITS) * PART_UNITS

    def part_of(length: int) -> int:
        return max(whole_tiles(-(-length // parts)), smallest)

    def border_behind(index: int) -> tuple[int, int, int]:
        # behind a request's last block this is (request + 1, 0), whether that request has queries or not
        request, block = entries[index]
        same = index + 1 < len(entries) and entries[index + 1][0] == request
        return (request, block + 1, 0) if same else (request + 1, 0, 0)

    end = (len(seq_lens), 0, 0)
    equal_parts = parts > 0 and part_of(longest) <= whole_tiles(share)
    cuts = []
    for cta in range(num_ctas + 1):
        if equal_parts:
            index = cta // parts
            if index >= len(entries):
                cuts.append(end)
                continue
            unit = cta % parts * part_of(units[entries[index][0]])
            border = unit > 0 and unit >= units[entries[index][0]]
        else:
            position, index = cta * share, 0
            while index < len(entries) and position >= weights[index]:
                position -= weights[index]
                index += 1
            if index == len(entries):
                cuts.append(end)
                continue
            unit = max(position - costs.entry, 0)
            if unit < costs.min_split:
                unit = 0
            border = unit > 0 and units[entries[index][0]] - unit < costs.min_split
        cuts.append(border_behind(index) if border else (*entries[index], unit))

    ranges = []
    for cta in range(num_ctas):
        begin, stop = cuts[cta], cuts[cta + 1]
        first, last = cta, cta
        if begin[2]:
            first = next(c for c in range(cta - 1, -1, -1) if cuts[c][:2] != begin[:2] or cuts[c][2] == 0)
        if stop[2]:
            last = next(
                c for c in range(cta + 1, num_ctas) if cuts[c + 1][:2] != stop[:2] or cuts[c + 1][2] == 0
            )
        paired = equal_parts and parts == 2 == num_ctas // len(entries) and (begin[2] > 0 or stop[2] > 0)
        ranges.append([*begin, first, *stop, last, int(paired)])
    return ranges
