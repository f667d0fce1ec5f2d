import functools
from collections.abc import Callable

import pytest
import torch

from mla_backend.kernels.portable import PortableDecode
from mla_backend.spec import DecoderSpec, Implementation


@pytest.fixture
def implementation_of_a_family():
    """What to pass to a decoder for a family of kernels, if it can run here; else the test is skipped.

    "portable_99k" are the portable kernels within the shared memory of Ada.
    """

    def check(family: str) -> str | Callable[[DecoderSpec], Implementation]:
        major = torch.cuda.get_device_capability()[0]
        if family == "hopper" and major != 9:
            pytest.skip("Hopper kernels need a Hopper GPU")
        if major < 8:
            pytest.skip("kernels need compute capability 8.0 or newer")
        return functools.partial(PortableDecode, within_99k=True) if family == "portable_99k" else family

    return check


@pytest.fixture(params=["hopper", "portable", "portable_99k"])
def implementation(implementation_of_a_family, request):
    return implementation_of_a_family(request.param)
