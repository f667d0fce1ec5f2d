"""How work is divided over CTAs: the planner's constants, and the planner in plain Python as its oracle.

The device planner (`csrc/common/plan.cuh`) runs once a decode step and writes one range per CTA. Query rows
of a request (query_len * num_heads) are cut into blocks of ``rows``; a (request, block) pair is an *entry*.
There are two ways to cut:

- *Shares*: all entries in a row, weighed by their keys in units plus a constant, are cut into ranges of
  equal weight. This balances any batch, but a range may hold the end of one entry and the start of the next,
  and both have to be written as partials and reduced.
- *Equal parts*: every entry is cut into the same number of parts, one per CTA. Taken if the longest entry's
  part is no larger than a share and one entry's constant: the other CTAs idle a little, but a CTA holds one
  part of one entry, and none is reduced at all where there is about one entry per CTA.

A batch without ``query_start_loc``, whose requests have equally many blocks, has as many *crews* of CTAs, if
they are no more than `MAX_CREWS`. Each computes one block of every request, and all of them are cut alike:
they read the same keys at about the same time, so that these should come from memory once and from the L2
cache otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

UNIT_TOKENS = 64
"""Keys in a unit, the granularity of cuts: whole tiles of the kernels (`kUnit` in `csrc/common/work.cuh`)."""

PLAN_WORDS = 48
"""int32 words of `CtaPlan` in `csrc/common/work.cuh`: a range, the slots of its first keys, and padding."""

ENTRY_COST = 2
"""What an entry costs beside its keys (loading queries, joining, writing, reducing), in units."""

MAX_CREWS = 8
"""Requests with more blocks are planned for one crew, so that no more than 7 CTAs are ever left over."""


def blocks_of_rows(num_heads: int, query_len: int, rows: int) -> int:
    """Number of row blocks of a request."""
    return -(-num_heads * query_len // rows)


def plan_reference(
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | int,
    *,
    num_heads: int,
    rows: int,
    num_ctas: int,
    whole: bool = False,
) -> list[list[int]]:
    """The ranges that the device planner must produce.

    Args:
        seq_lens: keys of each request.
        query_lens: query tokens of each request; a number if all have as many, which a batch without
            ``query_start_loc`` says.
        num_heads: query heads.
        rows: rows in a block.
        num_ctas: ranges to make.
        whole: no entry is cut, for bits that depend on nothing else.

    Returns:
        For each CTA: request, block and unit where its range starts, the first contributor of the entry
        there; the same where it ends (exclusive), with the last contributor; 1 if there are two CTAs for
        each entry and this one shares its with CTA ``cta ^ 1``; and 1 if no CTA computes two blocks of a
        request.
    """
    if isinstance(query_lens, Sequence):
        num_blocks = [blocks_of_rows(num_heads, query_len, rows) for query_len in query_lens]
        crews = 1
    else:
        blocks = blocks_of_rows(num_heads, query_lens, rows)
        crews = blocks if 0 < blocks <= min(MAX_CREWS, num_ctas) else 1
        num_blocks = [blocks // crews] * len(seq_lens)
    size = num_ctas // crews
    plan = _plan_crew(seq_lens, num_blocks, num_ctas=size, whole=whole)
    one_block = int(max(num_blocks, default=0) <= 1)
    ranges = []
    for crew, base in enumerate(range(0, crews * size, size)):
        for begin, block, unit, first, end, end_block, end_unit, last, paired in plan:
            cut = (begin, block + crew, unit, base + first, end, end_block + crew, end_unit, base + last)
            in_clusters = base % 2 == 0  # neighbours of the crew are neighbours of the grid
            ranges.append([*cut, int(paired and in_clusters), one_block])
    idle = (len(seq_lens), 0, 0)
    return ranges + [[*idle, cta, *idle, cta, 0, one_block] for cta in range(len(ranges), num_ctas)]


def _plan_crew(
    seq_lens: Sequence[int], num_blocks: Sequence[int], *, num_ctas: int, whole: bool
) -> list[list[int]]:
    """Ranges of CTAs that compute ``num_blocks`` blocks of each request; all fields but the last."""
    units = [-(-max(length, 0) // UNIT_TOKENS) for length in seq_lens]
    entries = [(request, block) for request, count in enumerate(num_blocks) for block in range(count)]
    weights = [units[request] + ENTRY_COST for request, _ in entries]
    total = sum(weights)
    num_shares = max(min(total // (1 + ENTRY_COST), num_ctas), 1)  # no smaller than one unit of one entry
    longest = max((units[request] for request, _ in entries), default=0)
    parts = min(1 if whole else num_ctas // len(entries), longest) if 0 < len(entries) <= num_ctas else 0

    def part_of(length: int) -> int:
        return max(-(-length // parts), 1)

    def border_behind(index: int) -> tuple[int, int, int]:
        # behind a request's last block this is (request + 1, 0), whether that request has queries or not
        request, block = entries[index]
        same = index + 1 < len(entries) and entries[index + 1][0] == request
        return (request, block + 1, 0) if same else (request + 1, 0, 0)

    end = (len(seq_lens), 0, 0)
    equal_parts = parts > 0 and part_of(longest) <= total // num_shares + ENTRY_COST
    cuts = []
    for cta in range(num_ctas + 1):
        if equal_parts:
            index = cta // parts
            if index >= len(entries):
                cuts.append(end)
                continue
            unit = cta % parts * part_of(units[entries[index][0]])
        else:
            position, index = cta * total // num_shares, 0
            while index < len(entries) and position >= weights[index]:
                position -= weights[index]
                index += 1
            if index == len(entries):
                cuts.append(end)
                continue
            unit = 0 if whole else max(position - ENTRY_COST, 0)
        behind = unit > 0 and unit >= units[entries[index][0]]
        cuts.append(border_behind(index) if behind else (*entries[index], unit))

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
