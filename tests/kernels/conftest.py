import pytest
import torch


@pytest.fixture
def implementation():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("sm90 kernels need a Hopper GPU")
    return "sm90"
