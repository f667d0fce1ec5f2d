"""Lets SGLang run decode context parallelism on a CPU: it refuses, and some of what it calls needs a GPU."""


def install() -> None:
    """Patch SGLang in this process, before it starts an engine whose processes are forks of this one."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.server_args import ServerArgs

    ServerArgs._handle_dcp_validation = lambda self: None
    parallel_state.is_cuda = lambda: True  # or else there is no group
    allocation._is_cuda = True  # or else pages of one token, not of one for each rank, are allocated
    parallel_state.GroupCoordinator.reduce_scatter_along_dim = _reduce_scatter
    MLATokenToKVPool.set_kv_buffer = _set_kv_buffer


def _reduce_scatter(group, tensor, dim=0):
    """An operator of SGLang's, for which it has no CPU implementation."""
    part = tensor.shape[dim] // group.world_size
    return group.all_reduce(tensor.contiguous()).narrow(dim, group.rank_in_group * part, part).contiguous()


def _set_kv_buffer(pool, layer, loc_info, latents, _):
    """What the kernel does that writes latents on a GPU: slot s is row s // size of rank s % size."""
    from sglang.srt.mem_cache.memory_pool import unwrap_write_loc
    from sglang.srt.runtime_context import get_parallel

    slots, parallel = unwrap_write_loc(loc_info)[0], get_parallel()
    here = slots % parallel.attn_dcp_size == parallel.attn_dcp_rank
    cache = pool.kv_buffer[layer.layer_id - pool.start_layer]
    cache[slots[here] // parallel.attn_dcp_size] = latents[here].to(pool.dtype).view(pool.store_dtype)
