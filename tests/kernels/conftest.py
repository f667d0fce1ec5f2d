import pytest
import torch


@pytest.fixture
def implementation_of_a_family():
    """The name of a family of kernels, if it can run here; else the test is skipped."""

    def check(family: str) -> str:
        major = torch.cuda.get_device_capability()[0]
        if family == "sm90" and major != 9:
            pytest.skip("sm90 kernels need a Hopper GPU")
        if major < 8:
            pytest.skip("kernels need compute capability 8.0 or newer")
        return family

    return check


@pytest.fixture(params=["sm90", "sm80", "sm80_99k"])
def implementation(implementation_of_a_family, request):
    return implementation_of_a_family(request.param)
