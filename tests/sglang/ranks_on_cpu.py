"""Lets SGLang divide a cache, or requests, among processes on a CPU: some of what it calls needs a GPU.

These functions patch SGLang in this process, before it starts an engine whose processes are forks of it.
"""

import torch


def allow_decode_context_parallelism() -> None:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.server_args import ServerArgs

    _use_collectives_without_operators()
    ServerArgs._handle_dcp_validation = lambda self: None
    parallel_state.is_cuda = lambda: True  # or else there is no group
    allocation._is_cuda = True  # or else pages of one token, not of one for each rank, are allocated
    MLATokenToKVPool.set_kv_buffer = _set_kv_buffer


def allow_data_parallel_attention() -> None:
    from sglang.srt.layers import dp_attention

    def tensor(*arguments, pin_memory=False, tensor=torch.tensor, **others):
        return tensor(*arguments, **others)

    _use_collectives_without_operators()
    torch.tensor = tensor  # SGLang pins memory on every platform but its own for CPUs
    dp_attention.memcpy_func = dp_attention.memcpy_cpu


def allow_separate_servers() -> None:
    from nixl._api import nixl_agent

    from tests.support.nixl_on_cpu import let_nixl_sleep

    let_nixl_sleep()
    make = nixl_agent.__init__

    def make_for_cpu(agent, *arguments, **others):
        make(agent, *arguments, **others)
        agent.nixl_mems["VRAM"] = agent.nixl_mems["DRAM"]  # where SGLang says that the cache is

    nixl_agent.__init__ = make_for_cpu
    torch.cuda.Event = torch.cpu.Event  # after which a cached prefix is sent


def _use_collectives_without_operators() -> None:
    """SGLang wraps them in operators that have no implementation for the CPU."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    GroupCoordinator.reduce_scatter_tensor = GroupCoordinator._reduce_scatter_tensor
    GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor


def _set_kv_buffer(pool, layer, loc_info, latents, _):
    """What the kernel does that writes latents on a GPU: slot s is row s // size of rank s % size."""
    from sglang.srt.mem_cache.memory_pool import unwrap_write_loc
    from sglang.srt.runtime_context import get_parallel

    slots, parallel = unwrap_write_loc(loc_info)[0], get_parallel()
    here = slots % parallel.attn_dcp_size == parallel.attn_dcp_rank
    cache = pool.kv_buffer[layer.layer_id - pool.start_layer]
    cache[slots[here] // parallel.attn_dcp_size] = latents[here].to(pool.dtype).view(pool.store_dtype)
