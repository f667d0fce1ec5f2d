"""The planner in plain Python: the oracle of the device planner (`csrc/schedule/planner.cuh`).

The planner runs once per decode step and deals the work out: one range of work per CTA. The query rows of a
request (query_len * num_heads) form m-blocks of ``rows`` rows. The line of all m-blocks, each as long as its
plan tiles plus a constant, is cut in one of two ways:

- *Balanced*: into ranges of equal cost. This balances any batch. But a range may hold the end of one m-block
  and the start of the next; both are then splits, which have to be written and combined.
- *Equal splits*: every m-block is cut into the same number of splits, one per CTA. The planner does so if a
  split of the longest m-block costs at most a sixteenth and one m-block's constant more than a balanced
  range. Some CTAs then idle a little, but each has a single split, and with about one m-block per CTA nothing
  is combined at all.

Without ``query_start_loc`` all requests have equally many m-blocks. If these are no more than
`MAX_CTA_GROUPS`, and nearly all CTAs find a place in groups of equal size, there is a group of CTAs for each
m-block index, and all groups are cut alike: they read the same keys at about the same time, so most of those
reads hit the L2 cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mla_backend.batch import WHOLE, Shard
from mla_backend.kernels.hopper import ManyRowsConfig

PLAN_TILE_TOKENS = 64
"""Tokens of the planner's tiles: cuts lie between tiles."""

M_BLOCK_COST, M_BLOCK_COST_OF_64_ROWS = 2, 3
"""What an m-block costs beside its keys (loading queries, writing and combining results), in plan tiles: by
default, and in Hopper's kernels with m-blocks of 64 rows."""

MAX_CTA_GROUPS = 8
"""Requests with more m-blocks have a single group."""

RANGES_PER_IDLE_RANGE = 16
"""With several groups, at most one range in 16 may be left without work. Equal splits may cost at most a
sixteenth more than a balanced range."""

Place = tuple[int, int, int]  # request, m-block, plan tile


def m_block_cost_of(config) -> int:
    """`kMBlockCost` of a kernel: what an m-block costs beside its keys, in plan tiles."""
    return M_BLOCK_COST_OF_64_ROWS if isinstance(config, ManyRowsConfig) else M_BLOCK_COST


def num_m_blocks(num_heads: int, query_len: int, rows: int) -> int:
    """The number of m-blocks of a request."""
    return -(-num_heads * query_len // rows)


def num_cta_groups(m_blocks: int, num_ranges: int) -> int:
    """The number of groups where all requests have so many m-blocks."""
    if not 0 < m_blocks <= min(MAX_CTA_GROUPS, num_ranges):
        return 1
    return m_blocks if num_ranges % m_blocks * RANGES_PER_IDLE_RANGE <= num_ranges else 1


def visible_keys(
    seq_len: int, query_len: int, num_heads: int, rows: int, m_block: int, shard: Shard = WHOLE
) -> int:
    """Keys of a shard that the last row of an m-block sees under the causal mask."""
    last_row = min((m_block + 1) * rows, query_len * num_heads) - 1
    return shard.keys_of(max(seq_len - (query_len - 1 - last_row // num_heads), 0))


def planned_ranges(
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | int,
    *,
    num_heads: int,
    rows: int,
    num_ctas: int,
    whole: bool = False,
    range_ctas: int = 1,
    shard: Shard = WHOLE,
    m_block_cost: int = M_BLOCK_COST,
) -> list[list[int]]:
    """The ranges that the device planner must write.

    Args:
        seq_lens: keys of each request, of all shards together.
        query_lens: query tokens of each request; one number for a batch without ``query_start_loc``.
        num_heads: query heads.
        rows: query rows of an m-block.
        num_ctas: number of ranges.
        whole: cut no m-block, as a batch-invariant decoder does.
        range_ctas: CTAs of a cluster that has one range; ``rows`` are those of all its CTAs. The plan has the
            first CTAs of all clusters, then the second ones, then what is left over.
        shard: whose keys are planned.
        m_block_cost: what an m-block costs beside its keys, in plan tiles.

    Returns:
        For each CTA: request, m-block and plan tile where its range begins, and the first CTA with a split of
        that m-block; the same four where the range ends (exclusive), with the last such CTA; 1 if the CTA
        shares its only m-block with CTA ``cta ^ 1``; 1 if no CTA has two m-blocks of one request.
    """
    if range_ctas > 1:
        options = dict(num_heads=num_heads, rows=rows, whole=whole, shard=shard, m_block_cost=m_block_cost)
        of_clusters = planned_ranges(seq_lens, query_lens, num_ctas=num_ctas // range_ctas, **options)
        return _numbered_by_halves(of_clusters, range_ctas) + _idle_ranges(
            len(seq_lens), range(num_ctas // range_ctas * range_ctas, num_ctas), same_m_block=1
        )
    if isinstance(query_lens, Sequence):
        each, groups = query_lens, 1
    else:
        each = [query_lens] * len(seq_lens)
        groups = num_cta_groups(num_m_blocks(num_heads, query_lens, rows), num_ctas)
    visible = [max(length, 0) for length in seq_lens]
    counts = [num_m_blocks(num_heads, query_len, rows) // groups for query_len in each]
    if groups == 1:
        keys = [
            [visible_keys(length, query_len, num_heads, rows, m_block, shard) for m_block in range(count)]
            for length, query_len, count in zip(visible, each, counts, strict=True)
        ]
    else:
        keys = [[shard.keys_of(length)] for length in visible]
    line = _Line.of(keys, num_ctas // groups, m_block_cost)
    same_m_block = int(max(counts, default=0) <= 1)
    ranges = _ranges_of_groups(line, groups, whole, same_m_block)
    return ranges + _idle_ranges(len(seq_lens), range(len(ranges), num_ctas), same_m_block)


def _numbered_by_halves(of_clusters: list[list[int]], range_ctas: int) -> list[list[int]]:
    """The ranges of all CTAs, from those of clusters: all first CTAs come before the second ones."""
    ranges = []
    for half in range(range_ctas):
        base = half * len(of_clusters)
        for *begin, first, request, m_block, tile, last, _, same_m_block in of_clusters:
            ranges.append([*begin, base + first, request, m_block, tile, base + last, 0, same_m_block])
    return ranges


def _idle_ranges(num_requests: int, ctas: Iterable[int], same_m_block: int) -> list[list[int]]:
    """The ranges of CTAs without work."""
    nowhere = (num_requests, 0, 0)
    return [[*nowhere, cta, *nowhere, cta, 0, same_m_block] for cta in ctas]


def _ranges_of_groups(line: _Line, groups: int, whole: bool, same_m_block: int) -> list[list[int]]:
    """The ranges of the CTAs of all groups, which are cut like ``line``."""
    splits = line.equal_splits(whole)
    cuts = line.cut_equally(splits) if splits else line.cut_by_cost(whole)
    in_pairs = splits == 2 == line.num_ctas // len(line.m_blocks)
    ranges = []
    for group in range(groups):
        base = group * line.num_ctas
        for member in range(line.num_ctas):
            begin, end = cuts[member], cuts[member + 1]
            first, last = _first_and_last_split(cuts, member)
            # A cluster begins at an even CTA.
            paired = in_pairs and base % 2 == 0 and (begin[2] > 0 or end[2] > 0)
            begins = (begin[0], begin[1] + group, begin[2], base + first)
            ends = (end[0], end[1] + group, end[2], base + last)
            ranges.append([*begins, *ends, int(paired), same_m_block])
    return ranges


@dataclass
class _Line:
    """The m-blocks that a group of CTAs computes, in a row."""

    num_requests: int
    m_blocks: list[tuple[int, int]]  # (request, m-block)
    tiles: list[int]  # plan tiles of each m-block
    num_ctas: int
    m_block_cost: int

    @classmethod
    def of(cls, keys: Sequence[Sequence[int]], num_ctas: int, m_block_cost: int) -> _Line:
        """``keys`` of each m-block of each request."""
        m_blocks = [(request, m_block) for request, each in enumerate(keys) for m_block in range(len(each))]
        tiles = [-(-keys[request][m_block] // PLAN_TILE_TOKENS) for request, m_block in m_blocks]
        return cls(len(keys), m_blocks, tiles, num_ctas, m_block_cost)

    @cached_property
    def cost(self) -> int:
        return sum(tiles + self.m_block_cost for tiles in self.tiles)

    @cached_property
    def num_balanced(self) -> int:
        """Ranges of equal cost: one per CTA, but none cheaper than an m-block with a single plan tile."""
        return max(min(self.cost // (1 + self.m_block_cost), self.num_ctas), 1)

    def place(self, index: int, tile: int) -> Place:
        """A plan tile of an m-block; behind the last one, the start of whatever follows."""
        if index == len(self.m_blocks):
            return self.num_requests, 0, 0
        request, m_block = self.m_blocks[index]
        if tile == 0 or tile < self.tiles[index]:
            return request, m_block, tile
        # Behind a request's last m-block this is (request + 1, 0), whether that request has queries or not.
        is_last = self.m_blocks[index + 1 : index + 2] != [(request, m_block + 1)]
        return (request + 1, 0, 0) if is_last else (request, m_block + 1, 0)

    def equal_splits(self, whole: bool) -> int:
        """The number of splits of each m-block if all have equally many; 0 if the cut is by cost."""
        if not 0 < len(self.m_blocks) <= self.num_ctas:
            return 0
        longest = max(self.tiles)
        splits = min(1 if whole else self.num_ctas // len(self.m_blocks), longest)
        balanced = self.cost // self.num_balanced
        most = balanced + balanced // RANGES_PER_IDLE_RANGE + self.m_block_cost
        fits = splits and _split_tiles(longest, splits) <= most
        return splits if fits else 0

    def cut_equally(self, splits: int) -> list[Place]:
        cuts = []
        for cta in range(self.num_ctas + 1):
            index, split = divmod(cta, splits)
            if index < len(self.m_blocks):
                cuts.append(self.place(index, split * _split_tiles(self.tiles[index], splits)))
            else:
                cuts.append(self.place(len(self.m_blocks), 0))
        return cuts

    def cut_by_cost(self, whole: bool) -> list[Place]:
        cuts = []
        for cta in range(self.num_ctas + 1):
            position, index = cta * self.cost // self.num_balanced, 0
            while index < len(self.m_blocks) and position >= self.tiles[index] + self.m_block_cost:
                position -= self.tiles[index] + self.m_block_cost
                index += 1
            cuts.append(self.place(index, 0 if whole else max(position - self.m_block_cost, 0)))
        return cuts


def _split_tiles(tiles: int, splits: int) -> int:
    return max(-(-tiles // splits), 1)


def _first_and_last_split(cuts: list[Place], cta: int) -> tuple[int, int]:
    """The CTA with the first split of the m-block in which a range begins, and with the last of the one in
    which it ends; the CTA itself where the range begins or ends between m-blocks."""
    begin, end = cuts[cta], cuts[cta + 1]
    first = last = cta
    if begin[2] > 0:
        while cuts[first][:2] == begin[:2] and cuts[first][2] > 0:
            first -= 1
    if end[2] > 0:
        while cuts[last + 1][:2] == end[:2] and cuts[last + 1][2] > 0:
            last += 1
    return first, last
