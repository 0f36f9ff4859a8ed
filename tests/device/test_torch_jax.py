"""``torch.jax``: the names of ``torch.cuda`` that scripts call on any accelerator."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator

import jax
import pytest
import torch

import isthmus
from isthmus._device.torch_glue import device_memory
from isthmus._runtime import watching

# What torch.cuda has and the device does not, each for one of these reasons.
ABSENT = {
    "CUDA's own handles and libraries": (
        "cudart cudaStatus CudaError DeferredCudaCallError check_error current_blas_handle current_solver_handle "
        "DEVICE_REQUIREMENT PYTORCH_RELEASES_CODE_CC Device GreenContext ExternalStream get_stream_from_external "
        "list_gpu_processes has_half has_magma classproperty"
    ),
    "its caching allocator, which XLA's stands in for": (
        "CUDAPluggableAllocator MemPool caching_allocator_alloc caching_allocator_delete caching_allocator_disabled "
        "caching_allocator_enable change_current_allocator memory_snapshot use_mem_pool host_memory_stats "
        "host_memory_stats_as_nested_dict reset_accumulated_host_memory_stats reset_peak_host_memory_stats "
        "get_per_process_memory_fraction"
    ),
    "capturing CUDA graphs by hand": "CUDAGraph graph graph_pool_handle export_dot export_graph_data",
    "legacy tensor and storage types of one dtype": (
        "BFloat16Storage BFloat16Tensor BoolStorage BoolTensor ByteStorage ByteTensor CharStorage CharTensor "
        "ComplexDoubleStorage ComplexFloatStorage DoubleStorage DoubleTensor FloatStorage FloatTensor HalfStorage "
        "HalfTensor IntStorage IntTensor LongStorage LongTensor ShortStorage ShortTensor"
    ),
}


def test_what_torch_cuda_has_is_there_or_absent_for_a_reason() -> None:
    absent = {name for names in ABSENT.values() for name in names.split()}
    named = vars(torch.cuda).items()
    names = {
        name
        for name, value in named
        if name in torch.cuda.__all__ and not isinstance(value, types.ModuleType)
    }
    assert {name for name in names if not hasattr(torch.jax, name)} <= absent
    for name in absent & names:
        assert not hasattr(torch.jax, name), f"{name} is there now: take it off the list"


def test_backends_has_a_module_for_the_device() -> None:
    import torch.backends.jax as module

    assert module is torch.backends.jax
    assert module.is_built()
    assert module.is_available()
    assert module.version() == jax.__version__
    assert module.platform() == jax.default_backend()


def test_memory() -> None:
    x = torch.ones(3_000_001, device="jax")  # larger than what other tests leave behind
    assert torch.jax.memory_allocated() >= x.nbytes
    assert torch.jax.max_memory_allocated() >= torch.jax.memory_allocated()
    free, total = torch.jax.mem_get_info()
    assert 0 < free <= total
    assert torch.jax.device_memory_used() <= total
    assert torch.jax.get_device_properties().total_memory == total
    nested = torch.jax.memory_stats_as_nested_dict()
    assert (
        nested["allocated_bytes"]["all"]["current"] == torch.jax.memory_stats()["allocated_bytes.all.current"]
    )
    summary = torch.jax.memory_summary()
    assert "MiB" in summary
    assert "float32[3000001]" in summary
    assert "float32[3000001]" not in torch.jax.memory_summary(abbreviated=True)
    assert torch.jax.memory.memory_allocated is torch.jax.memory_allocated
    with pytest.raises(RuntimeError, match=r"XLA_PYTHON_CLIENT_MEM_FRACTION=0\.5"):
        torch.jax.set_per_process_memory_fraction(0.5)


@pytest.fixture
def counted() -> Iterator[None]:
    yield
    watching.remove(device_memory._counted)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="JAX counts there, and its count cannot be reset")
def test_the_peak_of_eager_programs(counted: None) -> None:
    x = torch.ones(1_000_003, device="jax")
    (x + 1) * 2  # compiles
    torch.jax.reset_peak_memory_stats()
    before = torch.jax.memory_allocated()
    y = (x + 1) * 2
    assert torch.jax.memory_allocated() == before + y.nbytes
    assert torch.jax.max_memory_allocated() == before + 2 * x.nbytes  # x + 1 and its double
    del y
    torch.jax.reset_peak_memory_stats()
    x.add_(1)  # in place: no second array is alive after it
    assert torch.jax.max_memory_allocated() == torch.jax.memory_allocated() == before
    with isthmus.lazy():
        y = (x + 1) * 2
        isthmus.sync()
    # One program, whose parts are its own; it has a few bytes of checks beside its result.
    assert 0 <= torch.jax.max_memory_allocated() - before - y.nbytes < 1000


def test_a_traced_array_is_not_counted(counted: None) -> None:
    torch.jax.reset_peak_memory_stats()
    before = torch.jax.memory_allocated()
    apply = isthmus.torch_function(lambda x: (x + 1) * 2)
    assert jax.eval_shape(apply, jax.ShapeDtypeStruct((1_000_003,), "float32")).shape == (1_000_003,)
    assert torch.jax.max_memory_allocated() < before + 1_000_003 * 4


def test_autocast_is_bfloat16_unless_another_dtype_is_named() -> None:
    x = torch.ones(2, 2, device="jax")
    with torch.autocast("jax"):
        assert (x @ x).dtype == torch.bfloat16
    with torch.jax.amp.autocast(dtype=torch.float16):
        assert (x @ x).dtype == torch.float16


def test_ranges_nest() -> None:
    assert torch.jax.nvtx.range_pop() == -1
    assert torch.jax.nvtx.range_push("outer") == 0
    with torch.jax.nvtx.range("step {}", 3):
        assert torch.jax.nvtx.range_push("inner") == 2
        assert torch.jax.nvtx.range_pop() == 2
    assert torch.jax.nvtx.range_pop() == 0
    torch.jax.nvtx.mark("here")
    assert torch.jax.nvtx.range_pop() == -1


def test_what_jax_does_not_report_is_refused() -> None:
    for name in ("utilization", "temperature", "power_draw", "clock_rate", "memory_usage"):
        with pytest.raises(NotImplementedError, match="JAX does not report"):
            getattr(torch.jax, name)()
    with pytest.raises(NotImplementedError, match=r"isthmus\.metrics"):
        torch.jax.set_sync_debug_mode("warn")
    torch.jax.set_sync_debug_mode("default")


def test_graphs_say_that_they_change_nothing() -> None:
    with pytest.warns(UserWarning, match="changes nothing"):
        assert torch.jax.make_graphed_callables(inspect.signature, ()) is inspect.signature
    assert not torch.jax.is_current_stream_capturing()
    assert torch.jax.OutOfMemoryError is torch.OutOfMemoryError


def test_seeds() -> None:
    torch.jax.random.manual_seed_all(3)
    first = torch.rand(2, device="jax")
    state = torch.jax.random.get_rng_state()
    torch.jax.seed_all()
    torch.jax.random.set_rng_state(state)
    torch.jax.random.manual_seed(3)
    assert torch.equal(torch.rand(2, device="jax"), first)
