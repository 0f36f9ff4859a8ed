"""The private APIs we stand on do what we take them to do; test_drift.py sees what happens where they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus import _upstream
from isthmus._device.torch_glue import private as torch_private
from isthmus._runtime import private as jax_private
from isthmus._runtime.compiler import default_device


def test_versions_are_those_checked() -> None:
    for package, version in (("torch", torch.__version__), ("jax", jax.__version__)):
        oldest, newest = (
            _upstream.release(_upstream.OLDEST[package]),
            _upstream.release(_upstream.NEWEST[package]),
        )
        assert oldest <= _upstream.release(version) <= newest


def test_everything_optional_is_there() -> None:
    torch.zeros(1, device="jax")
    assert _upstream.switched_off == {}


def test_fast_call_is_the_cpp_path() -> None:
    x = jnp.ones((2, 2))
    compiled = jax.jit(lambda a: (a + a,)).lower(x).compile()
    call = jax_private.fast_call(compiled)
    assert call is not compiled, "JAX no longer offers create_cpp_call here: calls are right, but slower"
    assert call(x)[0].tolist() == [[2, 2], [2, 2]]


def test_fast_call_runs_64_bit_inputs_with_the_switch_off() -> None:
    with jax.enable_x64(True):
        x = jnp.arange(3, dtype=jnp.int64)
        compiled = jax.jit(lambda a: (a + 2**40,)).lower(x).compile()
    assert not jax.config.jax_enable_x64
    (found,) = jax_private.fast_call(compiled)(x)
    assert str(found.dtype) == "int64"
    assert found.tolist() == [2**40, 2**40 + 1, 2**40 + 2]


def test_is_traced() -> None:
    seen = []
    jax.jit(lambda a: seen.append(jax_private.is_traced([1, a])) or a)(1.0)
    assert seen == [True]
    assert not jax_private.is_traced([jnp.ones(1), 2])


def test_is_tracing() -> None:
    seen = []
    jax.jit(lambda x: (seen.append(jax_private.is_tracing()), x)[1])(jax.numpy.ones(2))
    jax.eval_shape(lambda x: (seen.append(jax_private.is_tracing()), x)[1], jax.numpy.ones(2))
    assert seen == [True, True]
    assert not jax_private.is_tracing()
    assert jax_private.trace_state_clean()


def test_in_backward() -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(torch_private.in_backward())
            return func(*args, **(kwargs or {}))

    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    with Watch():
        y = (x * 2).sum()
        assert seen == [False, False]
        y.backward()
    assert seen[-1]
    assert not torch_private.in_backward()


def test_meta_views_share_the_storage() -> None:
    x = torch.zeros(2, 3, device="jax")
    view = torch_private.restride(x, (3, 2), (1, 3), 0)
    assert view.device.type == "jax"
    assert view.stride() == (1, 3)
    assert view.untyped_storage()._cdata == x.untyped_storage()._cdata


@pytest.mark.parametrize("device", ["jax", "cpu"])
def test_views_made_under_a_guard_are_no_views_to_autograd(device: str) -> None:
    x = torch.zeros(2, 3, device=device, requires_grad=True)
    with torch_private.restriding():
        view = torch_private.restrided(x, (3, 2), (1, 3), 0)
    assert (view.device.type, view.shape, view.stride()) == (device, (3, 2), (1, 3))
    assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert not view.requires_grad
    assert not view._is_view()


def test_become_keeps_identity() -> None:
    x, y = torch.zeros(2, device="jax"), torch.ones(3, device="jax")
    before = id(x)
    assert id(torch_private.become(x, y)) == before
    assert x.tolist() == [1, 1, 1]


def test_a_buffer_survives_what_the_storage_survives() -> None:
    x = torch.ones(2, device="jax")
    storage = x.untyped_storage()
    buffer = storage._buffer
    del x
    assert storage._buffer is buffer
    kept = torch.nn.Parameter(torch.ones(2, device="jax")).detach()
    assert kept.tolist() == [1, 1]


def test_redispatch_and_names_with_kernel() -> None:
    op = torch.ops.aten._sparse_coo_tensor_with_dims.default
    made = torch_private.redispatch(op, "SparseCPU", 2, 0, (2, 3), layout=torch.sparse_coo, device="jax")
    assert (made.device.type, made.shape, made._nnz()) == ("jax", (2, 3), 0)
    names = torch_private.names_with_kernel("SparseCPU")
    assert "aten::_coalesce" in names
    assert "aten::exp" not in names


def test_has_kernel() -> None:
    torch.zeros(1, device="jax")
    assert torch_private.has_kernel(torch.ops.aten.add.Tensor, "PrivateUse1")
    assert torch_private.has_kernel(torch.ops.aten.softmax.int, "CompositeImplicitAutograd")
    assert not torch_private.has_kernel(torch.ops.aten.softmax.int, "Autograd")


def test_dynamo_keeps_the_steps_of_an_optimizer_on_the_device() -> None:
    torch._dynamo.reset()
    parameter = torch.nn.Parameter(torch.ones(3, device="jax"))
    parameter.grad = torch.ones(3, device="jax")
    optimizer = torch.optim.AdamW([parameter])
    torch.compile(optimizer.step, backend="isthmus")()
    assert optimizer.state[parameter]["step"].device.type == "jax"
    assert optimizer.state[parameter]["step"].item() == 1


def _asked(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., object], backend: str) -> int:
    """Return how often the code that Dynamo wrote for a function calls something of its own, each time it runs."""
    from torch._dynamo import utils

    torch._dynamo.reset()
    compiled, x = torch.compile(function, backend=backend), torch.ones(2, device="jax")
    compiled(x)
    calls, original = [], getattr(utils, name)
    with monkeypatch.context() as patch:
        patch.setattr(utils, name, lambda *args: calls.append(args) or original(*args))
        compiled(x)
    return len(calls)


def test_dynamo_looks_up_no_stream_for_a_graph_that_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(x: torch.Tensor) -> torch.Tensor:
        with torch.Stream(device="jax"):
            return x + 1

    def asked(function: Callable[..., object], backend: str) -> int:
        return _asked(monkeypatch, "get_current_stream", function, backend)

    assert asked(lambda x: x + 1, "isthmus") == 0
    assert asked(elsewhere, "isthmus") == asked(elsewhere, "aot_eager")
    if _upstream.release(torch.__version__) >= (2, 13):
        assert asked(lambda x: x + 1, "aot_eager") == asked(elsewhere, "isthmus") == 1


def test_dynamo_marks_no_calls_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def marked(backend: str) -> int:
        return _asked(monkeypatch, "record_pregraph_bytecode_enter", lambda x: x + 1, backend)

    theirs = marked("eager")  # 1 up to torch 2.13; later only where a profiler runs
    assert [marked("isthmus"), theirs, marked("isthmus")] == [0, theirs, 0]
    assert theirs or _upstream.release(torch.__version__) > (2, 13)


def test_gradients_of_attention_have_shapes() -> None:
    from isthmus._dynamo.private import gradients_of_attention

    backward = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward.default
    assert torch_private.has_kernel(backward, "Meta")
    grad, query, key, value = (torch.empty(2, 3, 4, 5, device="meta").transpose(1, 2) for _ in range(4))
    for bias in (None, torch.empty(4, 4, device="meta")):
        given = (grad, query, key, value, bias, [True] * 4, query, query[..., 0], None, None, 4, 4, 0.0, True)
        theirs, ours = backward(*given, grad, grad), gradients_of_attention(*given, grad, grad)
        assert [x is None for x in theirs] == [x is None for x in ours]
        described = [[(x.shape, x.stride()) for x in found if x is not None] for found in (theirs, ours)]
        assert described[0] == described[1]


def test_dynamo_leaves_a_hidden_function_alone() -> None:
    def visible(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def hidden(x: torch.Tensor) -> torch.Tensor:
        return visible(x) * 2

    seen: list[object] = []

    def backend(module: torch.fx.GraphModule, inputs: list[object]) -> object:
        seen.append(module)
        return module.forward

    torch_private.hide_from_dynamo(hidden)
    torch._dynamo.reset()
    assert torch.compile(hidden, backend=backend)(torch.ones(2)).tolist() == [4, 4]
    assert not seen, "a hidden function, or one that it calls, was compiled"
    assert torch.compile(visible, backend=backend)(torch.ones(2)).tolist() == [2, 2]
    assert len(seen) == 1


def test_values_asked_for_in_a_traced_backward() -> None:
    assert not torch_private.in_traced_backward(torch.ones(2))
    torch._dynamo.reset()
    x = torch.randn(3, 3, dtype=torch.complex64).to("jax").requires_grad_()
    torch.compile(lambda x: torch.linalg.svd(x).U.abs().sum(), backend="isthmus")(x).backward()
    assert x.grad is not None


def test_cudnn_attention_is_where_it_is_looked_for() -> None:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    assert cudnn.AttentionLayout.BTNH.value == 0
    assert callable(cudnn.dot_product_attention)
    assert cudnn._dot_product_attention_bwd_p_wrapper.name == "dot_product_attention_bwd_wrapper"


def test_plain_tensors_are_told_from_others() -> None:
    x = torch.ones(2).to("jax")
    assert torch_private.are_plain([x, torch.nn.Parameter(x), x[1:]])
    assert not torch_private.are_plain([torch.ones(2)])
    assert not torch_private.are_plain([x, x.to(torch.complex64).conj()])
    assert not torch_private.are_plain([x.to(torch.complex64).conj().imag])
    seen = []
    torch.func.vmap(lambda t: (seen.append(torch_private.are_plain([t])), t)[1])(x)
    with torch._subclasses.FakeTensorMode() as mode:
        seen.append(torch_private.are_plain([mode.from_tensor(x)]))
    assert seen == [False, False]


def test_autograd_sees_what_a_kernel_calls() -> None:
    x = torch.ones(2).to("jax").requires_grad_()
    with torch_private.below_autograd():
        assert not x.sin().requires_grad
        with torch_private.above_autograd():
            y = x.sin()
            (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, x.detach().cos())
    with torch.autocast("cpu", dtype=torch.bfloat16), torch_private.above_autograd():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
    with torch_private.above_autograd():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


def test_forward_mode_is_noticed() -> None:
    seen = [torch_private.in_forward_mode()]
    with torch.autograd.forward_ad.dual_level():
        seen.append(torch_private.in_forward_mode())
    torch.func.jvp(
        lambda x: (seen.append(torch_private.in_forward_mode()), x)[1], (torch.ones(2),), (torch.ones(2),)
    )
    assert seen == [False, True, True]


def test_function_transforms_are_noticed() -> None:
    seen = [torch_private.in_function_transform()]
    for transform in (torch.func.grad, torch.vmap):
        transform(lambda x: (seen.append(torch_private.in_function_transform()), x.sum())[1])(torch.ones(2))
    assert seen == [False, True, True]


def test_containers_of_torchs_pytrees() -> None:
    import collections

    flatten, unflatten = torch_private.container_of(collections.deque) or (None, None)
    assert flatten is not None
    items, rest = flatten(collections.deque([1, 2]))
    assert unflatten(rest, items) == collections.deque([1, 2])
    assert torch_private.container_of(torch.Tensor) is None


def test_dead_code_leaves_a_jaxpr() -> None:
    def with_dead_code(x: jax.Array, y: jax.Array) -> jax.Array:
        jnp.sin(x)
        return x + y

    jaxpr = jax.make_jaxpr(with_dead_code)(1.0, 2.0).jaxpr
    left = jax_private.without_dead_code(jaxpr)
    assert [str(equation.primitive) for equation in left.eqns] == ["add"]
    assert len(left.invars) == 2


def test_functions_dynamo_does_not_look_into() -> None:
    from isthmus._dynamo.private import nonstrict_trace

    opaque = nonstrict_trace(lambda x: x * float(str(2)))
    compiled = torch.compile(lambda x: opaque(x) + 1, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3, 3]


def test_tensors_are_told_from_those_of_another_layout() -> None:
    a, b = torch.arange(6.0, device="jax").view(2, 3), torch.zeros(2, device="jax", requires_grad=True)
    alike = torch_private.likeness([a, b])
    assert alike(a, b)
    assert alike(torch.ones(2, 3, device="jax"), b)
    others = [
        a.t(),
        a.int(),
        a.view(3, 2),
        a.flatten(),
        a.cpu(),
        a.clone().requires_grad_(),
        a.expand(2, 3)[:, :2],
    ]
    assert not any(alike(other, b) for other in others)
    assert not alike(a, b.detach())
    a.data = a.data.view(3, 2)
    assert not alike(a, b)
    a.data = a.data.view(2, 3)
    assert alike(a, b)
    a.t_()
    assert not alike(a, b)


def test_callers_are_forgotten() -> None:
    assert __file__ in str((jnp.ones(2) + 1).traceback)
    with jax_private.forgetting_callers():
        made = jnp.ones(2) + 1
    assert __file__ not in str(made.traceback)


def test_numpy_arrays_are_put_in_their_own_dtype() -> None:
    put = jax_private.putter(default_device())
    arrays = [np.array(2**40), np.array([0.1]), np.zeros((0, 3), np.int8), np.ones((2, 2), jnp.bfloat16)]
    with jax.enable_x64(False):
        for array in arrays:
            found = put(array)
            assert (found.shape, found.dtype) == (array.shape, array.dtype)
            assert (np.asarray(found) == array).all()
            assert found.committed
            assert found.devices() == {default_device()}


def test_the_first_size_and_others_are_told_apart() -> None:
    from isthmus._dynamo.private import compiles_again

    torch._dynamo.reset()
    found = []

    def backend(module: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        found.append(compiles_again())
        return module.forward

    run = torch.compile(lambda x: x + 1, backend=backend)
    run(torch.ones(3))
    run(torch.ones(4))
    assert found == [False, True]
    assert not compiles_again()
    torch._dynamo.reset()


def test_hooks_on_saved_tensors_are_seen() -> None:
    assert not torch_private.has_saving_hooks()
    with torch.autograd.graph.save_on_cpu():
        assert torch_private.has_saving_hooks()


def test_tensors_that_are_not_what_their_storage_holds() -> None:
    class Subclass(torch.Tensor):
        pass

    x = torch.ones(2, device="jax")
    plain = [x, x[1:], torch.ones(2), torch.nn.Parameter(x), x.cpu().as_subclass(Subclass)]
    assert all(torch_private.is_plain_in_memory(tensor) for tensor in plain)
    assert not torch_private.is_plain_in_memory(torch._to_functional_tensor(torch.ones(2)))
    with torch._subclasses.FakeTensorMode() as mode:
        assert not torch_private.is_plain_in_memory(mode.from_tensor(x))
