"""The buffers of the decode kernels, and which of their launches wait for the plan."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mla_backend import jit
from mla_backend.batch import DecodeBatch
from mla_backend.errors import InvalidInputError, UnsupportedError
from mla_backend.kernels import base, hopper
from mla_backend.kernels.base import Workspace
from mla_backend.spec import DecodeCall
from tests.kernels.test_select import SPEC


class Recorder:
    """In place of kernels: notes which launches may overlap their predecessors."""

    most_resident = 1000

    def __init__(self):
        self.overlaps = []

    def workspace(self):
        return Workspace(max_ctas=192, plan_words=48, request_words=4, flag_stride=32, split_words=514)

    def resident(self, device):
        return self.most_resident

    def plan(self, *arguments):
        return 1

    def decode(self, *arguments):
        self.overlaps.append(arguments[-1])


@pytest.fixture
def kernels(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(jit, "load_all", lambda variants: [recorder for _ in variants])
    monkeypatch.setattr(jit, "load", lambda variant: recorder)
    properties = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return recorder


@pytest.mark.parametrize(
    "multiprocessors, num_ctas, ctas", [(8, None, 8), (8, 3, 3), (8, 9, 8), (300, None, 192)]
)
def test_buffers_are_for_the_most_ctas_and_the_largest_batch(
    kernels, monkeypatch, multiprocessors, num_ctas, ctas
):
    properties = SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    spec = replace(SPEC, device=torch.device("cpu"), max_batch=5, num_ctas=num_ctas)
    decoder = hopper.HopperDecode(spec)
    assert decoder._plans.shape == (ctas, 48)
    assert decoder._flags.shape == (ctas, 32)
    assert decoder._split_buffers.shape == (2 * ctas, 514)
    assert decoder._ends.shape == (2 * 5,)
    assert decoder._requests.shape == (5, 4)


def test_profiling_variants_are_loaded_with_a_buffer_for_stamps(kernels, monkeypatch):
    loaded = []
    monkeypatch.setattr(
        jit, "load_all", lambda variants: [loaded.append(variant) or kernels for variant in variants]
    )
    decoder = hopper.HopperDecode(replace(SPEC, device=torch.device("cpu")), profile=True)
    assert [variant.name.endswith("-profile") for variant in loaded] == [True]
    assert len(decoder.stamps) == len(decoder._plans)


# p: plan; r: run; capital letters: captured by a graph.
@pytest.mark.parametrize(
    "calls, overlaps",
    [
        ("prrr", [False, True, True]),
        ("prrpr", [False, True, False]),
        ("pRRrr", [True, True, False, True]),
        ("PRRprr", [False, True, False, True]),
        ("prRrPRRpr", [False, True, True, False, True, False]),
        ("PpRr", [False, False]),
    ],
)
def test_the_first_launch_after_a_plan_waits_for_it(kernels, monkeypatch, calls, overlaps):
    decoder = hopper.HopperDecode(replace(SPEC, device=torch.device("cpu")))
    q = torch.zeros(1, 16, 576, dtype=torch.bfloat16)
    tensors = q[..., :512], q[..., 512:], torch.zeros(1, 64, 576)
    batch = DecodeBatch(torch.ones(1).int(), torch.zeros(1, 1).int(), 64, None, 1)
    for call in calls:
        monkeypatch.setattr(base, "is_captured", lambda device, call=call: call.isupper())
        if call in "pP":
            plan = decoder.plan(batch)
            continue
        decoder.run(DecodeCall(*tensors, 1.0, True, None, None, q, q), plan)
    assert kernels.overlaps == overlaps


def test_a_captured_plan_runs_in_its_graph_alone(kernels, monkeypatch):
    decoder = hopper.HopperDecode(replace(SPEC, device=torch.device("cpu")))
    q = torch.zeros(1, 16, 576, dtype=torch.bfloat16)
    tensors = q[..., :512], q[..., 512:], torch.zeros(1, 64, 576)
    monkeypatch.setattr(base, "is_captured", lambda device: True)
    plan = decoder.plan(DecodeBatch(torch.ones(1).int(), torch.zeros(1, 1).int(), 64, None, 1))
    monkeypatch.setattr(base, "is_captured", lambda device: False)
    with pytest.raises(InvalidInputError, match="plan again for other runs"):
        decoder.run(DecodeCall(*tensors, 1.0, True, None, None, q, q), plan)


def test_no_more_ctas_than_are_resident_at_once(kernels, monkeypatch):
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    spec = replace(SPEC, device=torch.device("cpu"))
    kernels.most_resident = 130
    assert len(hopper.HopperDecode(spec)._plans) == 130
    kernels.most_resident = 0
    with pytest.raises(UnsupportedError, match="no CTA of the decode kernels fits"):
        hopper.HopperDecode(spec)


def test_split_buffers_grow_with_kernels_that_are_loaded_later(kernels, monkeypatch):
    """Those that captured graphs use stay."""
    larger = Recorder()
    larger.workspace = lambda: kernels.workspace()._replace(split_words=1000)
    monkeypatch.setattr(jit, "load", lambda variant: larger)
    decoder = hopper.HopperDecode(replace(SPEC, device=torch.device("cpu")))
    before = decoder._split_buffers
    assert before.shape == (2, 514)
    decoder.plan(DecodeBatch(torch.ones(1).int(), torch.zeros(1, 1).int(), 64, None, 5))
    assert decoder._split_buffers.shape == (2, 1000) and decoder._outgrown == [before]
    larger.most_resident = 0
    with pytest.raises(UnsupportedError, match="only 0 CTAs .* make it with implementation='torch'"):
        decoder.plan(DecodeBatch(torch.ones(1).int(), torch.zeros(1, 1).int(), 64, None, 7))
