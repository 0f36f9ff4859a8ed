"""The device as torch sees it: registered in time, one device, torch.jax and torch.accelerator in full."""

import contextlib
import os
import subprocess
import sys
import time
from importlib.metadata import entry_points
from typing import Any, ClassVar

import pytest
import torch

import _isthmus_autoload
import isthmus
from tests.interpreters import forked

LATE = """
import torch
torch.ones(2, requires_grad=True).sum().backward()
import isthmus
for _ in range(2):
    try:
        torch.ones(2, device="jax")
    except isthmus.errors.RegistrationError as error:
        assert "before the first backward()" in str(error), error
    else:
        raise SystemExit("no error")
torch.ones(2, requires_grad=True).sum().backward()
"""
IN_TIME = """
import torch
import isthmus
torch.ones(2, requires_grad=True).sum().backward()
x = torch.ones(2, device="jax", requires_grad=True)
x.sum().backward()
assert x.grad.tolist() == [1.0, 1.0]
"""
LAZY = """
import sys, torch
assert torch.device("jax").type == "jax" and torch.jax.is_available()
import isthmus
assert not [m for m in ("jax", "torch._dynamo", "isthmus._ops.registry") if m in sys.modules]
torch.zeros(2).pickled = 1; repr(torch.zeros(2)); torch.zeros(2).untyped_storage().nbytes()
assert "jax" not in sys.modules
torch.ones(2, device="jax")
assert "jax" in sys.modules
import jax
assert not jax.config.jax_enable_x64
"""


def run(code: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA's queue in autograd serves us too")
def test_registered_after_a_backward_says_so() -> None:
    run(LATE, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_registered_by_hand_before_a_backward_works() -> None:
    run(IN_TIME, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.mark.skipif(
    _isthmus_autoload.rival() is not None
    or not [e for e in entry_points(group="torch.backends") if e.name == "isthmus"],
    reason="torch finds the package only where it is installed and takes no other accelerator's place",
)
def test_import_torch_is_enough_and_loads_no_jax() -> None:
    run(LAZY)


def test_another_device_in_the_slot_is_named() -> None:
    code = """
import torch
torch.utils.rename_privateuse1_backend("other")
try:
    import isthmus
except RuntimeError as error:
    assert type(error).__name__ == "RegistrationError" and "'other'" in str(error), error
else:
    raise SystemExit("no error")
"""
    run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="jax:1"),
        lambda: torch.full((2,), 1.0, device="jax:1"),
        lambda: torch.tensor([1], device="jax:1"),
        lambda: torch.ones(2).to("jax:1"),
        lambda: torch.ones(2, device="jax").to("jax:1"),
        lambda: torch.jax.set_device(1),
        lambda: torch.UntypedStorage(8, device="jax:1"),
    ],
)
def test_a_second_device_is_refused(make) -> None:
    with pytest.raises(RuntimeError, match="jax:1"):
        make()


def test_the_first_device_by_its_number() -> None:
    assert torch.zeros(2, device="jax:0").device == torch.device("jax", 0)
    assert torch.zeros(2, device=torch.device("jax")).is_jax


def test_default_device() -> None:
    torch.set_default_device("jax")
    try:
        assert torch.zeros(2).device.type == "jax"
        assert torch.tensor([1, 2]).device.type == "jax"
        assert torch.nn.Linear(2, 2).weight.device.type == "jax"
        assert torch.get_default_device().type == "jax"
    finally:
        torch.set_default_device(None)
    with torch.device("jax"):
        assert torch.ones(2).device.type == "jax"
    assert torch.ones(2).device.type == "cpu"


def test_accelerator() -> None:
    kept = torch.ones(1024, device="jax")
    accelerator = torch.accelerator
    assert accelerator.is_available()
    assert accelerator.device_count() == 1
    assert accelerator.current_accelerator() == torch.device("jax")
    assert accelerator.current_device_index() == 0
    accelerator.set_device_index(0)
    accelerator.synchronize()
    if hasattr(accelerator, "memory_allocated"):
        assert accelerator.memory_allocated() >= kept.nbytes
        assert accelerator.max_memory_allocated() >= accelerator.memory_allocated() >= kept.nbytes
        assert accelerator.memory_stats()["allocated_bytes.all.current"] >= kept.nbytes
        accelerator.reset_peak_memory_stats()
        accelerator.empty_cache()


def test_device_module() -> None:
    module = torch.get_device_module("jax")
    assert module is torch.jax
    assert module.is_available()
    assert module.is_initialized()
    assert module.device_count() == 1
    assert module.current_device() == 0
    assert isinstance(module.get_device_name(), str)
    kept = torch.ones(1000, device="jax")
    assert module.max_memory_allocated() >= module.memory_allocated() >= kept.nbytes
    free, total = module.mem_get_info()
    assert 0 < free <= total
    assert torch.bfloat16 in module.get_amp_supported_dtype()
    assert module.is_bf16_supported()
    with module.device(0):
        module.synchronize()
    module.current_stream().synchronize()
    assert module.get_device_properties().name == module.get_device_name()


def left_after_waiting(last: Any) -> float:
    """Return how much of the time until a result is there is left after ``synchronize``.

    Not ``is_ready()``: XLA lets the next program run a moment before it calls the last one's result ready.
    """
    start = time.perf_counter()
    torch.jax.synchronize()  # type: ignore[attr-defined]
    waited = time.perf_counter()
    last.block_until_ready()
    end = time.perf_counter()
    return (end - waited) / (end - start)


def test_synchronize_waits_for_results_nobody_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    isthmus.config.shapes = (
        "exact"  # a product that is padded, as other tests may have left it, holds no array
    )

    x = torch.full((1500, 1500), 1e-3, device="jax")
    x @ x  # compiled
    torch.jax.synchronize()  # type: ignore[attr-defined]
    monkeypatch.setattr(jax, "live_arrays", list)
    y = x
    for _ in range(5):
        y = y @ x
    last = y.untyped_storage()._buffer.held  # type: ignore[attr-defined]
    if last.is_ready():
        pytest.skip("this device is done before it can be waited for")
    assert left_after_waiting(last) < 0.1


class Slow(torch.autograd.Function):
    """Begins a long computation in its backward and keeps nothing of it but an array to look at."""

    begun: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x[0, 0].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        (x,) = ctx.saved_tensors
        y = x
        for _ in range(5):
            y = y @ x
        Slow.begun.append(y.untyped_storage()._buffer.held)  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["plain", "no_grad", "inference"])
def test_synchronize_waits_for_what_backward_began(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    isthmus.config.shapes = (
        "exact"  # a product that is padded, as other tests may have left it, holds no array
    )

    x = torch.full((1500, 1500), 1e-3, device="jax")
    x @ x  # compiled
    torch.jax.synchronize()  # type: ignore[attr-defined]
    monkeypatch.setattr(jax, "live_arrays", list)
    Slow.begun.clear()
    Slow.apply(x.requires_grad_()).backward()
    (last,) = Slow.begun
    if last.is_ready():
        pytest.skip("this device is done before it can be waited for")
    modes = {"plain": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    with modes[mode]():
        assert left_after_waiting(last) < 0.1


def test_synchronize_starts_no_thread_of_autograds() -> None:
    code = """
import glob, torch
x = torch.ones(3, device="jax") * 2
torch.jax.synchronize()
names = [open(path).read() for path in glob.glob("/proc/self/task/*/comm")]
assert not any(name.startswith("pt_autograd") for name in names), names
"""
    forked(code).check_returncode()


def test_random_state_goes_back_and_forth() -> None:
    state = torch.jax.get_rng_state()
    first = torch.rand(3, device="jax")
    torch.jax.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="jax"), first)
    torch.jax.manual_seed(7)
    assert torch.jax.initial_seed() == 7
    first = torch.rand(3, device="jax")
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3, device="jax"), first)


def test_torchs_settings_stay_as_they_were() -> None:
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device().type == "cpu"
    assert torch.get_float32_matmul_precision() == "highest"
    assert isthmus.__version__


RIVAL = """
import os, sys, warnings
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
os.environ.pop("ISTHMUS_AUTOLOAD", None)
import torch
torch.version.cuda = "13.0"  # as if torch were built for CUDA, and a GPU were there
plain, os.path.exists = os.path.exists, lambda path: path == "/dev/nvidiactl" or plain(path)
import _isthmus_autoload
assert _isthmus_autoload.rival() == "cuda"
_isthmus_autoload.run()
assert "isthmus" not in sys.modules
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    if sys.argv[1] == "asked":
        os.environ["ISTHMUS_AUTOLOAD"] = "1"
        _isthmus_autoload.run()
    else:
        import isthmus
assert torch.ones(2, device="jax").sum().item() == 2
assert [w for w in seen if "backward() of a 'cuda' tensor may now fail" in str(w.message)], seen
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it plays the device files of Linux")
@pytest.mark.parametrize("how", ["asked", "imported"])
def test_import_torch_takes_no_place_from_cuda(how: str) -> None:
    ran = subprocess.run([sys.executable, "-c", RIVAL, how], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_no_rival_here_means_none_is_named() -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_built():
        assert _isthmus_autoload.rival() is not None
    else:
        assert _isthmus_autoload.rival() is None
