"""A torch or JAX that changed costs what changed, never the device: drift.py beside this file stages the change."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import isthmus
from isthmus._graph.names import Missing, overload_named
from isthmus._graph.schema import Argument, Schema, schema_of
from isthmus._ops import known_schemas, registry
from tests.device.drift import NAME_CHANGES, SCHEMA_CHANGES, private_names
from tests.interpreters import forked_early
from tests.support import in_mode

ROOT = Path(__file__).parents[2]
# Without these there is no device; `import torch` still works, and the error names what is missing.
NEEDED = {
    "torch._C.DispatchKey",
    "torch._C.DispatchKey.AutocastPrivateUse1",
    "torch._C.DispatchKey.Meta",
    "torch._C.DispatchKey.Undefined",
    "torch._C.DispatchKey.__members__",
    "torch._C.DispatchKey.__members__.items",
    "torch._C.DispatchKeySet",
    # Guards: without them kernels would be called again by autocast, or lose what autograd records.
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch._C._ForceDispatchKeyGuard",
    "torch._C._dispatch_tls_local_exclude_set",
    "torch._C._dispatch_tls_local_include_set",
    "torch._C._acc.DeviceGuard",
    "torch._C._acc.PrivateUse1Hooks",
    "torch._C._acc.create_empty_tensor",
    "torch._C._autograd.DeviceType.PrivateUse1",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._get_privateuse1_backend_name",
    "torch._C.Event",
    "torch._C.Generator",
    "torch._C.Stream",
    "torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND",
    "torch._prims_common.elementwise_dtypes",
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend",
}
QUICK = [
    ("schemas", "renamed", "1.0"),
    ("schemas", "gone", "1.0"),
    ("private", "torch._dynamo.graph_bytecode_inputs", "another type"),
    ("private", "jax._src.core.trace_state_clean", "another signature"),
    ("private", "torch._C._acc.create_empty_tensor", "another signature"),
]
EVERY = [("schemas", change, share) for change in SCHEMA_CHANGES for share in ("1.0", "0.3")]
EVERY += [("private", name, change) for name in private_names() for change in NAME_CHANGES]


def run(*arguments: str) -> str:
    """Return what tests/device/drift.py said."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    ran = subprocess.run(
        [sys.executable, "tests/device/drift.py", *arguments],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.strip().splitlines()[-1]


def check(what: str, first: str, second: str) -> None:
    """Run one change: everything computes the same, or there is no device and its absence is explained."""
    said = run(what, first, second)
    if what == "private" and first in NEEDED:
        assert said.startswith("same") or said.startswith("no device: "), said
    else:
        assert said.startswith("same"), said


@pytest.mark.parametrize(("what", "first", "second"), QUICK)
def test_one_change(what: str, first: str, second: str) -> None:
    check(what, first, second)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "first", "second"), [row for row in EVERY if row not in QUICK])
def test_every_change(what: str, first: str, second: str) -> None:
    check(what, first, second)


def _argument(name: str, has_default: bool) -> Argument:
    return Argument(name, "static", "int", 0 if has_default else None, has_default, False, False, True, 99)


def _changed(schema: Schema, change: str) -> Schema | None:
    """Return a schema as a later torch might have it; None where there is nothing to change that way."""
    arguments = schema.arguments
    if change == "added with a default":
        arguments = (*arguments, _argument("new", True))
    elif change == "added without a default":
        arguments = (*arguments, _argument("new", False))
    elif not arguments:
        return None
    elif change == "renamed":
        arguments = (
            *arguments[:-1],
            dataclasses.replace(arguments[-1], name="another_name", has_default=False),
        )
    elif change == "removed":
        arguments = arguments[:-1]
    elif change == "retyped":
        arguments = (*arguments[:-1], dataclasses.replace(arguments[-1], type="Device"))
    return dataclasses.replace(schema, arguments=arguments)


@pytest.mark.parametrize("change", [change for change in SCHEMA_CHANGES if change != "gone"])
def test_every_op_by_itself(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new argument with a default is ignored; any other change refuses the one lowering and leaves the others."""
    torch.zeros(1, device="jax")
    before = dict(registry.registry)
    for name in known_schemas.known_forms():
        space, packet, overload = name.split(".")
        op = overload_named(f"{space}::{packet}.{overload}")
        if isinstance(op, Missing) or name in known_schemas.NEEDED:
            continue
        schema = _changed(schema_of(op), change)
        if schema is None:
            continue
        matched = known_schemas.match(schema)
        if change == "added with a default":
            assert matched is not None, name
            assert "new" not in {argument.name for argument in matched.arguments}
            continue
        assert matched is None, f"{name} {change} was taken for what it was"
        if op in before:
            monkeypatch.setitem(registry.refused, name, "")
            monkeypatch.setattr(registry, "schema_of", lambda op, schema=schema: schema)
            registry.lowering(op, replace=True)(before[op].function)
            monkeypatch.setattr(registry, "schema_of", schema_of)
            assert "has other arguments in this torch" in registry.refused[name]
    assert registry.registry == before


def test_a_renamed_argument_that_is_known_reaches_the_lowering() -> None:
    """torch 2.14 calls ``grad`` of ``_cdist_backward`` ``grad_output``: the list has both, the lowering one."""
    x = torch.randn(5, 3)
    expected = torch.randn(5, 4)
    gradients = []
    for device in ("cpu", "jax"):
        a, b = x.detach().clone().to(device).requires_grad_(), x[:4].to(device)
        torch.cdist(a, b).backward(expected.to(device))
        gradients.append(a.grad.cpu())
    torch.testing.assert_close(*gradients)
    forms = known_schemas.known_forms()["aten._cdist_backward.default"]
    assert {form[0][0] for form in forms} == {"grad", "grad_output"}
    function = {"grad", "x1", "x2", "p", "cdist"}
    now = known_schemas.match(schema_of(torch.ops.aten._cdist_backward.default))
    assert now is not None
    assert set(now.renamed(function)) <= {"grad_output"}


@torch.library.custom_op("isthmus_drift::scaled", mutates_args=())
def scaled(x: torch.Tensor, *, alpha: torch.types.Number = 1, shift: float = 0.0) -> torch.Tensor:
    """Stand for an op whose arguments with defaults are newer than its lowering."""
    return x * alpha + shift


scaled.register_fake(lambda x, *, alpha=1, shift=0.0: torch.empty_like(x))
isthmus.lowering(torch.ops.isthmus_drift.scaled.default)(lambda x: x * 1)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["eager", "lazy", "compiled"])
def test_a_new_argument_runs_on_the_device_until_it_is_given(mode: str) -> None:
    """Numbers too: as a run-time value none could be seen to be its default."""
    x = torch.arange(3.0).to("jax")
    assert in_mode(lambda: (scaled(x * 2) + 1).tolist(), mode)() == [1, 3, 5]
    isthmus.config.fallback = "cpu"
    for given, want in [
        ({"alpha": -3}, [1, -5, -11]),
        ({"alpha": 0.5}, [1, 2, 3]),
        ({"shift": 2.0}, [3, 5, 7]),
    ]:
        assert in_mode(lambda given=given: (scaled(x * 2, **given) + 1).tolist(), mode)() == want


INTERRUPTED = """
import sys, torch

class Interrupt:
    '''Interrupts the import of one family, once.'''
    def find_spec(self, name, path, target=None):
        if name == "isthmus._ops.{family}":
            sys.meta_path.remove(self)
            raise {error}
sys.meta_path.insert(0, Interrupt())
try:
    torch.zeros(1, device="jax")
except BaseException as error:
    print(type(error).__name__)
x = torch.arange(6., device="jax").reshape(2, 3)
x[0] += 1
print((x @ x.T).softmax(-1).sum().item(), torch.compile(lambda x: x * 2, backend="isthmus")(x).sum().item())
"""


@pytest.mark.parametrize(
    ("family", "error", "name"),
    [
        ("math.unary", "KeyboardInterrupt", "KeyboardInterrupt"),
        ("tensors.views", "ImportError('a new JAX')", "RegistrationError"),
        ("nn.activation", "MemoryError", "MemoryError"),
    ],
)
def test_a_load_that_fails_leaves_nothing_half_done(family: str, error: str, name: str) -> None:
    code = INTERRUPTED.format(family=family, error=error)
    ran = forked_early(code)
    assert ran.returncode == 0, ran.stderr
    first, second = ran.stdout.splitlines()
    assert first == name
    assert [round(float(v), 4) for v in second.split()] == [2.0, 36.0]


def test_the_public_decorator_still_raises() -> None:
    with pytest.raises(isthmus.errors.SchemaError, match="already has a lowering"):
        isthmus.lowering(torch.ops.aten.add.Tensor)(lambda self, other: self)
