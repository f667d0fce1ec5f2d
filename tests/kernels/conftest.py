import pytest
import torch


@pytest.fixture(params=["sm90", "sm80", "sm80_99k"])
def implementation(request):
    major = torch.cuda.get_device_capability()[0]
    if request.param == "sm90" and major != 9:
        pytest.skip("sm90 kernels need a Hopper GPU")
    if major < 8:
        pytest.skip("kernels need compute capability 8.0 or newer")
    return request.param
