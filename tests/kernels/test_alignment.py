"""What the kernels cannot address is refused before anything is launched: seen without a GPU."""

import pytest
import torch

from mla_backend import jit
from mla_backend.errors import KernelBuildError
from mla_backend.kernels import hopper, portable
from tests.support.missing import skip_without

CONFIGS = {
    "portable": portable.decode_config(torch.bfloat16, 512, 64, 16, "80", within_99k=False),
    "hopper": hopper.decode_config(torch.bfloat16, 512, 64, page_size=1, rows=16),
}


def shifted(*shape):
    """Rows that begin 2 bytes behind a multiple of 16."""
    return torch.zeros(*shape[:-1], shape[-1] + 8, dtype=torch.bfloat16)[..., 1 : 1 + shape[-1]]


def narrow(*shape):
    """Rows whose distance is no multiple of 16 bytes."""
    return torch.zeros(*shape[:-1], shape[-1] + 1, dtype=torch.bfloat16)[..., : shape[-1]]


@pytest.mark.parametrize("make", [shifted, narrow])
@pytest.mark.parametrize("name", ["q_nope", "q_rope", "latent_cache", "out"])
@pytest.mark.parametrize("kernel", CONFIGS)
def test_misaligned_tensors_are_refused(kernel, name, make):
    try:
        module = jit.load(CONFIGS[kernel].variant())
    except KernelBuildError as error:
        skip_without("nvcc", error)
    shapes = {"q_nope": (2, 16, 512), "q_rope": (2, 16, 64), "latent_cache": (3, 4, 576), "out": (2, 16, 512)}
    tensors = {key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
    tensors[name] = make(*shapes[name])
    numbers = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"{name} must be aligned to "):
        module.decode(
            tensors["q_nope"], tensors["q_rope"], tensors["latent_cache"], None, None, numbers, None, numbers,
            True, numbers, torch.zeros(1), numbers, tensors["out"], torch.zeros(2, 16), None, 1, 0, 1, 1,
            False, True, 1.0, 2, 0, 0, True, False,
        )  # fmt: skip
