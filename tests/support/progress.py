"""Decoders beside whatever takes multiprocessors away from them: all must end, with the right results.

    python -m tests.support.progress <case> <implementation> <seconds>

A process of its own, since a launch that never ends cannot be stopped otherwise. `CASES` names the cases; the
exit status is 0 if all launches ended and were right.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch

from mla_backend import jit
from mla_backend.errors import InvalidInputError
from tests.support.cases import Case, decoder_for, make_case, relative_error

TOLERANCE = 2.5e-3  # of bf16
GREEN_MULTIPROCESSORS = 64


class Shape(NamedTuple):
    """Requests of ``keys`` keys each. With drafts, some have two query tokens and the others one: such ragged
    batches are launched in clusters on Hopper, as those with more than 64 query rows are."""

    requests: int
    keys: int
    num_heads: int = 16
    drafts: bool = False


SHAPES = [
    (Shape(1, 8192), Shape(4, 2048)),
    (Shape(64, 2048), Shape(7, 30000)),
    (Shape(1, 131072), Shape(64, 1024)),
    (Shape(1, 131072, num_heads=128), Shape(1, 8192)),
    (Shape(3, 30000, num_heads=128), Shape(5, 9000, drafts=True)),
]
"""Of two decoders that run at the same time."""


class Worker:
    """A decoder with a batch, and the bits that it should give."""

    def __init__(self, shape: Shape, implementation: str):
        query_lens = [1 + i % 2 * shape.drafts for i in range(shape.requests)]
        self.case: Case = make_case(
            [shape.keys] * shape.requests, query_lens, num_heads=shape.num_heads, page_size=64
        )
        self.decoder = decoder_for(self.case, implementation=implementation)
        self.out = torch.empty(sum(query_lens), shape.num_heads, 512, dtype=torch.bfloat16, device="cuda")
        self.lse = torch.empty(sum(query_lens), shape.num_heads, device="cuda")
        self.plan()
        self.wanted: tuple[torch.Tensor, torch.Tensor] | None = None

    def plan(self) -> None:
        self.planned = self.decoder.plan(self.case.batch)

    def run(self) -> None:
        case = self.case
        self.decoder.run(
            case.q_nope, case.q_rope, case.cache, self.planned, case.scale, out=self.out, lse=self.lse
        )

    def poison(self) -> None:
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))

    def check(self) -> None:
        """The first time against fp64, then for the same bits."""
        if self.wanted is None:
            assert relative_error(self.out, self.case.expected()[0]) <= TOLERANCE
            self.wanted = self.out.clone(), self.lse.clone()
        assert torch.equal(self.out, self.wanted[0]) and torch.equal(self.lse, self.wanted[1])


def captured(function: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            function()
    return graph.replay


def beside_each_other(jobs: list[tuple[torch.cuda.Stream, Callable[[], None], int]]) -> None:
    """Call each function so many times on its stream, from threads of their own."""

    errors = []

    def loop(stream: torch.cuda.Stream, function: Callable[[], None], times: int) -> None:
        try:
            with torch.cuda.stream(stream):
                for _ in range(times):
                    function()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    torch.cuda.synchronize()


def streams(implementation: str, seconds: float, in_graphs: bool = False) -> None:
    """Two decoders on streams of equal and of different priority, with and without products on a third."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for shapes in SHAPES:
        workers = [Worker(shape, implementation) for shape in shapes]
        for worker in workers:
            worker.run()
            torch.cuda.synchronize()
            worker.check()
        runs = [captured(worker.run) if in_graphs else worker.run for worker in workers]
        for priorities in ((0, 0), (0, -1)):
            for products in (0, 40):
                lanes = [torch.cuda.Stream(priority=priority) for priority in (*priorities, 0)]
                jobs = [(lane, run, 20 if in_graphs else 200) for lane, run in zip(lanes, runs, strict=False)]
                jobs.append((lanes[2], lambda: a @ a, products))
                for worker in workers:
                    worker.poison()
                torch.cuda.synchronize()
                end, rounds = time.monotonic() + seconds, 0
                while rounds == 0 or time.monotonic() < end:
                    beside_each_other(jobs)
                    rounds += 1
                for worker in workers:
                    worker.check()
                print(implementation, shapes, priorities, products, "products", rounds, "rounds", flush=True)


def graphs(implementation: str, seconds: float) -> None:
    """As `streams`, by captured graphs."""
    streams(implementation, seconds, in_graphs=True)


@contextlib.contextmanager
def green_stream(multiprocessors: int) -> Iterator[torch.cuda.Stream]:
    """A stream that owns only so many multiprocessors, while the primary context stays current."""
    from cuda.bindings import driver

    def call(function, *arguments):
        status, *results = function(*arguments)
        assert status == driver.CUresult.CUDA_SUCCESS, (function.__name__, status)
        return results[0] if len(results) == 1 else results

    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    everything = call(driver.cuDeviceGetDevResource, 0, kind)
    groups, *_ = call(driver.cuDevSmResourceSplitByCount, 1, everything, 0, multiprocessors)
    description = call(driver.cuDevResourceGenerateDesc, groups, 1)
    context = call(
        driver.cuGreenCtxCreate, description, 0, driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    )
    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = call(driver.cuGreenCtxStreamCreate, context, flags, 0)
    yield torch.cuda.ExternalStream(int(stream))
    torch.cuda.synchronize()
    call(driver.cuStreamDestroy, stream)


def green(implementation: str, seconds: float) -> None:
    """A decoder that knows of no green context, planned and run on a stream of one, and on others in turn."""
    for shape in (Shape(1, 8192), Shape(64, 2048), Shape(3, 9000)):
        worker = Worker(shape, implementation)
        worker.run()
        torch.cuda.synchronize()
        expected = worker.out.clone()
        assert worker.planned.state.num_ctas == torch.cuda.get_device_properties(0).multi_processor_count
        with green_stream(GREEN_MULTIPROCESSORS) as stream:
            for on_stream in (True, False, True):
                with torch.cuda.stream(stream) if on_stream else contextlib.nullcontext():
                    worker.plan()
                    assert (worker.planned.state.num_ctas == GREEN_MULTIPROCESSORS) == on_stream
                    for run in (worker.run, captured_on(worker, stream) if on_stream else worker.run):
                        worker.poison()
                        run()
                        torch.cuda.synchronize()
                        assert relative_error(worker.out, worker.case.expected()[0]) <= TOLERANCE
                        assert on_stream or torch.equal(worker.out, expected)
            try:
                worker.run()
            except ValueError as error:
                assert "the plan was made for 64 CTAs" in str(error), error
            else:
                raise AssertionError("a plan for 64 multiprocessors ran on a stream that has all")
        print(implementation, shape, "in a green context", flush=True)


def captured_on(worker: Worker, stream: torch.cuda.Stream) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    graph.capture_begin()
    worker.run()
    graph.capture_end()
    return graph.replay


class Gang:
    """Another library's cooperative kernel: all CTAs meet, each alone on its multiprocessor."""

    SOURCE = """\
#include "ffi/launch.cuh"
#include "ffi/tensors.cuh"
#include <cooperative_groups.h>
__global__ void meet(int* count) {
    if (threadIdx.x == 0) atomicAdd(count, 1);
    cooperative_groups::this_grid().sync();
}
void launch_gang(tvm::ffi::TensorView count, int64_t ctas) {
    const int shared_bytes = 200 << 10;
    mla::ffi::check(cudaFuncSetAttribute(meet, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                    "reserving shared memory");
    auto* address = mla::ffi::data<int>(count);
    void* arguments[] = {&address};
    mla::ffi::check(cudaLaunchCooperativeKernel(meet, dim3(ctas), dim3(128), arguments, shared_bytes,
                                                mla::ffi::stream_of(count)),
                    "launching a gang");
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch_gang, launch_gang);
"""

    def __init__(self, ctas: int):
        variant = jit.KernelVariant("test_gang", self.SOURCE, jit.arch_of(torch.device("cuda:0")))
        self._launch = jit.load(variant).launch_gang
        self._ctas = ctas
        self.count = torch.zeros(1, dtype=torch.int32, device="cuda")

    def run(self) -> None:
        self._launch(self.count, self._ctas)


def gangs(implementation: str, seconds: float) -> None:
    """A decoder beside cooperative launches of another library on a stream of higher priority."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    least, greatest = torch.cuda.Stream.priority_range()
    for ctas in (20, torch.cuda.get_device_properties(0).multi_processor_count):
        worker, gang = Worker(Shape(1, 8192), implementation), Gang(ctas)
        for runs in (worker.run, captured(worker.run)):
            lanes = [torch.cuda.Stream(priority=priority) for priority in (least, greatest, least)]
            jobs = [(lanes[0], runs, 200), (lanes[1], gang.run, 200), (lanes[2], lambda: a @ a, 40)]
            worker.poison()
            gang.count.zero_()
            torch.cuda.synchronize()
            end, rounds = time.monotonic() + seconds, 0
            while rounds == 0 or time.monotonic() < end:
                beside_each_other(jobs)
                rounds += 1
            worker.check()
            assert gang.count.item() == rounds * 200 * ctas
            print(implementation, "beside gangs of", ctas, "CTAs", rounds, "rounds", flush=True)


def green_context(implementation: str, seconds: float) -> None:
    """A green context that is current, as torch makes it."""
    from torch.cuda.green_contexts import GreenContext

    context = GreenContext.create(num_sms=GREEN_MULTIPROCESSORS, device_id=0)
    worker = Worker(Shape(1, 8192), implementation)
    torch.cuda.synchronize()
    context.set_context()
    try:
        worker.plan()
        assert worker.planned.state.num_ctas == GREEN_MULTIPROCESSORS
        worker.run()
        torch.cuda.synchronize()
    finally:
        context.pop_context()
    worker.check()


def process(implementation: str, seconds: float) -> None:
    """One of several processes on a GPU: decode by kernels of both families, and check, for so long."""
    shapes = Shape(1, 8192), Shape(64, 2048)
    workers = [Worker(shape, name) for shape in shapes for name in (implementation, "portable")]
    end, launches = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for worker in workers:
            worker.poison()
            for _ in range(100):
                worker.run()
            worker.check()
        launches += 100 * len(workers)
    print(launches, "launches beside another process", flush=True)


def limited(implementation: str, seconds: float) -> None:
    """A decoder that is limited by hand."""
    case = make_case([8192], [1], num_heads=16, page_size=64)
    decoder = decoder_for(case, implementation=implementation, num_ctas=100)
    plan = decoder.plan(case.batch)
    assert plan.state.num_ctas == 100
    out, _ = decoder.run(case.q_nope, case.q_rope, case.cache, plan, case.scale)
    assert relative_error(out, case.expected()[0]) <= TOLERANCE


def misfit(implementation: str, seconds: float) -> None:
    """A graph captured on a part of the GPU meets a plan for all of it: an error, not a wait."""
    from torch.cuda.green_contexts import GreenContext

    context = GreenContext.create(num_sms=GREEN_MULTIPROCESSORS, device_id=0)
    worker = Worker(Shape(1, 8192), implementation)
    torch.cuda.synchronize()
    context.set_context()
    try:
        worker.plan()
        worker.run()
        replay = captured(worker.run)
    finally:
        context.pop_context()
    worker.plan()
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        replay()
        torch.cuda.synchronize()
    with pytest.raises(InvalidInputError, match="was for another number of CTAs"):
        worker.run()


CASES = {
    function.__name__: function
    for function in (streams, graphs, gangs, green, green_context, misfit, process, limited)
}

if __name__ == "__main__":
    CASES[sys.argv[1]](sys.argv[2], float(sys.argv[3]))
