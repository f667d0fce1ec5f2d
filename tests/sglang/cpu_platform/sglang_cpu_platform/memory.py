"""The KV pool, and a page allocator without Triton for versions whose own allocator needs it."""

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool


class MLAPool(MLATokenToKVPool):
    """Full of NaN at first, as memory of a GPU may be.

    Drops an argument that 0.5.16 passes to out-of-tree pools, but that its own pool does not have.
    """

    def __init__(self, *args, index_head_dim=None, **kwargs):
        super().__init__(*args, **kwargs)
        for buffer in self.kv_buffer:
            buffer.fill_(torch.nan if buffer.is_floating_point() else 0x7F)  # NaN in e4m3


def paged_allocator() -> type | None:
    """The allocator class to use; None if SGLang's own works on a CPU."""
    if "use_triton_kernels" in PagedTokenToKVPoolAllocator.__init__.__code__.co_names:
        return None
    return _TorchPagedAllocator


class _TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    def alloc_extend(
        self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, *_, **__
    ):
        lengths = zip(prefix_lens_cpu.tolist(), seq_lens_cpu.tolist(), last_loc.tolist(), strict=True)
        return self._allocate([(first, last, slot) for first, last, slot in lengths])

    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc):
        lengths = zip(seq_lens_cpu.tolist(), last_loc.tolist(), strict=True)
        return self._allocate([(length - 1, length, slot) for length, slot in lengths])

    def _allocate(self, requests):
        """Allocate slots for tokens first to last of each request; `slot` holds the token before them.

        Returns None if there are too few free pages.
        """
        slots, pages = [], self.free_pages.tolist()
        used = 0
        for first, last, slot in requests:
            for token in range(first, last):
                if token % self.page_size == 0:
                    if used == len(pages):
                        return None
                    slot = pages[used] * self.page_size
                    used += 1
                else:
                    slot += 1
                slots.append(slot)
        self.free_pages = self.free_pages[used:]
        return torch.tensor(slots, dtype=torch.int64, device=self.device)
