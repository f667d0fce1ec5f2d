import pytest
import torch


@pytest.fixture(params=["sm90"])
def implementation(request):
    if request.param == "sm90" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("sm90 kernels need a Hopper GPU")
    return request.param
