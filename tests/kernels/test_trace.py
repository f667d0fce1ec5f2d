"""Stamps of a kernel as a Chrome trace."""

import json
import re

import pytest
import torch

from mla_backend.jit import csrc_dir
from mla_backend.kernels import trace


def test_events_and_sizes_are_the_kernels():
    source = (csrc_dir() / "decode/hopper/profile.cuh").read_text()
    names = (
        re.search(r"enum class Event : uint32_t \{(.*?)\}", source, re.DOTALL)[1].replace(" ", "").split(",")
    )
    spoken = [re.sub(r"(?<!^)([A-Z])", r" \1", name.strip()[1:]).lower() for name in names if name.strip()]
    assert spoken == list(trace.EVENTS)
    sizes = dict(re.findall(r"constexpr int (kProfile\w+) = (\d+)", source))
    _, roles, stamps, _ = trace.stamp_buffer(1, torch.device("cpu")).shape
    assert sizes == {"kProfileStamps": str(stamps), "kProfileRoles": str(roles)}


def test_stages_become_slices():
    stamps = trace.stamp_buffer(2, torch.device("cpu"))
    keys, merged = trace.EVENTS.index("keys arrived"), trace.EVENTS.index("merged")
    stamps[0, 1, 0] = torch.tensor([3, 5000])  # three stamps, started at 5000 ns
    stamps[0, 1, 1:4] = torch.tensor([[0, 100], [keys, 400], [merged, 1100]])
    stamps[1, 2, 0] = torch.tensor([2, 5200])
    stamps[1, 2, 1:3] = torch.tensor([[0, 7], [keys, 57]])
    made = json.loads(json.dumps(trace.chrome_trace(stamps)))["traceEvents"]
    slices = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in made if e["ph"] == "X"]
    assert slices == [
        (0, 1, "keys arrived", 0.0, 0.3),
        (0, 1, "merged", 0.3, 0.7),
        (1, 2, "keys arrived", 0.2, 0.05),
    ]
    assert {(e["pid"], e["tid"]) for e in made} == {(0, 1), (1, 2)}, "the others have done nothing"


@pytest.mark.gpu
def test_a_launch_leaves_a_trace():
    from mla_backend_bench.cases import Case
    from mla_backend_bench.trace import record

    made = record(Case.parse("2x1000x16x1"), torch.bfloat16)["traceEvents"]
    seen = {(e["tid"], e["name"]) for e in made if e["ph"] == "X"}
    assert {(0, "loads issued"), (1, "keys arrived"), (1, "scores"), (2, "merged")} <= seen
