"""The platform class. SGLang imports it early, so functions import other SGLang modules themselves."""

import psutil
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class PlainCpuPlatform(SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_device_total_memory(self, device_id=0):
        return psutil.virtual_memory().total

    def get_available_memory(self, device_id=0):
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_current_memory_usage(self, device=None):
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def is_pin_memory_available(self, device=None):
        return False

    def get_device(self, device_id=0):
        return "cpu"

    def set_device(self, device):
        pass

    def get_device_name(self, device_id=0):
        return "cpu"

    def get_device_uuid(self, device_id=0):
        return "cpu"

    def get_device_capability(self, device_id=0):
        return None

    def empty_cache(self):
        pass

    def synchronize(self):
        pass

    def get_torch_distributed_backend_str(self):
        return "gloo"

    def get_default_attention_backend(self):
        return "torch_native"

    def get_dispatch_key_name(self):
        return "native"

    def get_mla_kv_pool_cls(self):
        from sglang_cpu_platform.memory import MLAPool

        return MLAPool

    def get_mha_kv_pool_cls(self):
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_kv_pool_cls(self, *, kind):
        return None  # from 0.5.22: SGLang's own

    def get_paged_allocator_cls(self):
        from sglang_cpu_platform.memory import paged_allocator

        return paged_allocator()
