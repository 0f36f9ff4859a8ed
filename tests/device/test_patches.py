"""What Isthmus replaces in torch and JAX: all of it is in one table, and little of it comes with ``import torch``."""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from isthmus._device.torch_glue import patches
from tests.interpreters import forked_early, fresh

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "isthmus").rglob("*.py"))


def python(code: str, autoload: str = "1", prefix: str = "") -> str:
    """Run code where torch is imported, or nothing is with ``autoload="0"``; return what it printed."""
    code = prefix + textwrap.dedent(code)
    ran = forked_early(code) if autoload == "1" else fresh(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert ran.returncode == 0, ran.stderr
    return str(ran.stdout).strip()


# Every attribute of every module and class of torch, and of Python's signal, by what it is and where it is written;
# not by what it holds.
ATTRIBUTES = '''
import json, sys, types
CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
        types.GetSetDescriptorType, types.ClassMethodDescriptorType, types.MethodType, property, classmethod,
        staticmethod, type)

def described(value):
    inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    code = inner.__code__ if isinstance(inner, types.FunctionType) else None
    place = f"{code.co_filename}:{code.co_firstlineno}" if code else ""
    return f"{type(value).__name__} {getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', '')} {place}"

def attributes():
    """Return a description of every function, method, property and dict of torch's modules and classes, by its name."""
    found, classes = {}, {}
    code = (*CODE, dict, sys.modules["torch._C"]._ImperativeEngine)
    for name, module in sorted(sys.modules.items()):
        if module is None or name.split(".")[0] not in ("torch", "signal"):
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, type) and str(value.__module__).split(".")[0] == "torch":
                classes[f"{value.__module__}.{value.__qualname__}"] = value
            elif isinstance(value, code):
                found[f"{module.__name__}.{attribute}"] = described(value)
    for name, value in classes.items():
        for attribute, member in list(vars(value).items()):
            if isinstance(member, code):
                found[f"{name}.{attribute}"] = described(member)
    return found

def show(extra):
    for name in extra:
        __import__(name)
    print(json.dumps(attributes()))
'''
EXTRA = [
    "torch._dynamo.codegen",
    "torch._dynamo.variables.optimizer",
    "torch._dynamo.backends.common",
    "torch._functorch.partitioners",
    "torch._inductor.compile_fx",
    "torch.nn.attention.flex_attention",
    "torch._higher_order_ops.flex_attention",
]
# As torch is once it has any device of this name that is written in Python: its own methods for it are not our patches.
BARE = """
import types, torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as setup
module = types.ModuleType("module")
module._initialized, module.is_available = True, lambda: False
setup("jax", backend_module=module)
"""
STAGES = {
    patches.IMPORT: "import torch\n",
    patches.TENSOR: "import torch; torch.ones(2, device='jax')\n",
    patches.COMPILE: """
import torch
x = torch.ones(2, device="jax")
torch.compile(lambda x: x * 2, backend="isthmus")(x)
""",
}
WITHDRAWN = """
import torch._inductor.compile_fx
from isthmus._device.torch_glue import patches
from isthmus._device.torch_glue.storage_patches import install
inforce = {str(p): vars(patches.object_at(p.owner))[p.name] for p in patches.applied()}
assert len(inforce) > 25, inforce
install()
assert all(vars(patches.object_at(p.owner))[p.name] is inforce[str(p)] for p in patches.applied()), "applied twice"
for patch in patches.applied():
    patches.restore(patch.owner, patch.name)
assert not patches.applied()
assert len(torch.UntypedStorage(8)) == len(torch.ones(2).untyped_storage()) == 8
"""


def attributes_after(stage: str, autoload: str = "1") -> dict[str, str]:
    return json.loads(python(f"{stage}\nshow({EXTRA})", autoload, prefix=ATTRIBUTES))


def differences(one: dict[str, str], other: dict[str, str]) -> set[str]:
    """Return the names of torch that are not what they were; those of modules that only one of them loaded aside."""
    return {name for name in one.keys() & other.keys() if one[name] != other[name]} | {
        name for name in other.keys() - one.keys() if name.rpartition(".")[0] in OWNERS
    }


def full_name(patch: patches.Patch) -> str:
    """Return the name that ``attributes`` gives what a row replaces."""
    place = patches.object_at(patch.owner)
    return f"{place.__module__}.{place.__qualname__}.{patch.name}" if isinstance(place, type) else str(patch)


OWNERS = {full_name(patch).rpartition(".")[0] for patch in patches.TABLE}


@functools.cache
def bare(compiled: bool) -> dict[str, str]:
    """Return the attributes of a torch without Isthmus; Dynamo replaces some itself when it first compiles."""
    compiles = 'torch.compile(lambda x: x * 2, backend="aot_eager")(torch.ones(2))\n' if compiled else ""
    return attributes_after(BARE + compiles, autoload="0")


def rows_until(when: str) -> set[str]:
    """Return what the rows that are in force by then replace, as far as this torch has the names."""
    order = list(STAGES)
    rows = [p for p in patches.TABLE if p.when in order[: order.index(when) + 1] and not p.adds]
    return {full_name(p) for p in rows if hasattr(patches.object_at(p.owner), p.name)}


@pytest.mark.parametrize("when", STAGES)
def test_the_table_is_what_differs_in_torch(when: str) -> None:
    without = bare(when == patches.COMPILE)
    assert len(without) > 10_000
    assert differences(without, attributes_after(STAGES[when])) == rows_until(when)


def test_few_names_are_replaced_by_import_torch() -> None:
    rows = [p for p in patches.TABLE if p.when == patches.IMPORT]
    # Reached by asking for an accelerator, pinned memory, a new storage, a generator or a file of torch.jit.
    names = {"torch.Tensor.pin_memory", "torch.UntypedStorage.__new__", "torch.jit.load", "torch.Generator"}
    assert {str(row) for row in rows if not row.adds and not row.name.startswith("_accelerator_")} == names
    assert len(rows) == 14
    assert all(len(row.reason.split()) > 5 for row in patches.TABLE)


def test_patches_can_be_taken_back_and_are_applied_once() -> None:
    assert not differences(bare(True), attributes_after(STAGES[patches.COMPILE] + WITHDRAWN))


def test_a_patch_without_a_row_is_refused() -> None:
    with pytest.raises(KeyError, match=r"has no row in isthmus\._device\.torch_glue\.patches\.TABLE"):
        patches.replace("torch.Tensor", "sum", lambda theirs: theirs)
    with pytest.raises(KeyError, match="has no row"):
        patches.register("jax.tree_util", "register_dataclass", int)


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize(
    "owner", ["torch.Tensor", "torch._tensor_str", "torch.no_such_module", "no_such_package"]
)
def test_a_missing_name_is_skipped_and_reported(
    owner: str, optional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = patches.Patch(owner, "no_such_name", patches.TENSOR, "it shows what is lost", optional)
    monkeypatch.setitem(patches._rows, (owner, "no_such_name"), patch)
    monkeypatch.setattr(patches, "skipped", {})
    patches.replace(owner, "no_such_name", lambda theirs: theirs)
    assert patch not in patches.applied()
    assert (patch in patches.skipped) != optional
    lines = "\n".join(patches.report())
    assert (f"skipped {owner}.no_such_name" in lines and "it shows what is lost" in lines) != optional


def test_what_a_third_party_replaced_since_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Place:
        name = 1

    patch = patches.Patch("torch.place", "name", patches.TENSOR, "")
    monkeypatch.setitem(patches._rows, ("torch.place", "name"), patch)
    monkeypatch.setattr(torch, "place", Place, raising=False)
    patches.replace("torch.place", "name", lambda theirs: theirs + 1)
    assert Place.name == 2
    Place.name = 7
    patches.restore("torch.place", "name")
    assert Place.name == 7
    patches.replace("torch.place", "name", lambda theirs: theirs + 1)
    patches.restore("torch.place", "name")
    assert Place.name == 7


def test_the_device_works_where_no_name_is_found() -> None:
    python(
        """
        import inspect, torch, isthmus
        from isthmus._device.torch_glue import patches
        # As if this torch had none of the names that wait for the first tensor.
        def missing(path):
            raise AttributeError(f"no {path}")
        patches.object_at = missing
        isthmus.config.fallback = "error"
        x = torch.arange(4.0, device="jax", requires_grad=True)
        (x * x).sum().backward()
        assert x.grad.tolist() == [0, 2, 4, 6]
        assert "tensor([0., 1., 2., 3.], device='jax:0'" in repr(x)
        with isthmus.lazy():
            assert (x + 1).sum().item() == 10
        lines = patches.report()
        assert len(patches.skipped) > 20 and any("torch.Tensor.data_ptr" in line for line in lines), lines
        """
    )


EARLY = {
    "a storage": "assert torch.UntypedStorage(4, device='jax').nbytes() == 4",
    "a storage moved": "assert torch.ones(2).untyped_storage().to(device='jax').nbytes() == 8",
    "a typed storage": "assert torch.TypedStorage(4, dtype=torch.int16, device='jax').nbytes() == 8",
    "a file": "assert torch.load(io.BytesIO(file), map_location='jax')['x'].data_ptr()",
    "a pickled tensor": "x = pickle.loads(pickled); assert x.is_jax and x.untyped_storage().nbytes() == 8",
    "the default device": "torch.set_default_device('jax'); assert torch.ones(2).data_ptr()",
    "a tensor like another": "assert torch.empty_like(torch.ones(2), device='jax').untyped_storage().nbytes() == 8",
    "a compiled factory": """
f = torch.compile(lambda: torch.ones(2, device="jax") * 2, backend="isthmus")
assert f().data_ptr() and f().untyped_storage().nbytes() == 8
""",
    "an array": "import isthmus, jax; assert isthmus.from_jax(jax.numpy.ones(2)).data_ptr()",
    "lazy mode": """
import isthmus
with isthmus.lazy():
    x = torch.ones(2, device="jax")
    assert x.data_ptr() and x.untyped_storage().nbytes() == 8
""",
    "pinned memory": """
data = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, pin_memory=True)
assert [batch.tolist() for batch in data] == [[0, 1], [2, 3]]
assert "jax" not in sys.modules
""",
    "torch.accelerator": """
from torch import accelerator as a
for each in (a.synchronize, a.empty_cache, a.reset_peak_memory_stats, a.reset_accumulated_memory_stats):
    each()
a.synchronize(0)
getattr(a, "empty_host_cache", a.empty_cache)()
assert a.memory_allocated() == a.max_memory_reserved(0) == 0 and a.memory_stats("jax") == {}
assert "jax" not in sys.modules
assert a.memory.get_memory_info()[1] > 0
""",
}
FORKING = """
import io, json, os, pickle, sys, torch
codes, pickled = json.loads(sys.stdin.read()), bytes.fromhex(sys.argv[1])
written = io.BytesIO()
torch.save({"x": torch.ones(2)}, written)
file = written.getvalue()
for name, code in codes.items():
    # This process has not loaded JAX, and so may fork; each child starts as if it had just imported torch.
    if not (child := os.fork()):
        try:
            exec(code)
        except BaseException as error:
            print(name, repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("failed:", name, flush=True)
assert "jax" not in sys.modules
"""


QUICK = ["a storage", "a compiled factory", "pinned memory", "torch.accelerator"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it starts each case in a fork of one process")
@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([name for name in EARLY if name not in QUICK], marks=pytest.mark.slow)]
)
def test_whatever_comes_first_finds_the_device_whole(names: list[str]) -> None:
    import pickle

    pickled = pickle.dumps(torch.ones(2, device="jax")).hex()
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, pickled],
        input=json.dumps({name: EARLY[name] for name in names}),
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stdout + ran.stderr


def test_dynamo_says_nothing_about_pointers_of_cpu_tensors() -> None:
    python(
        """
        import warnings, torch, torch._dynamo
        warnings.simplefilter("error", UserWarning)
        def pointers(x):
            return x.data_ptr(), x.untyped_storage().nbytes(), x.untyped_storage().data_ptr(), x * 2
        def check():
            torch._dynamo.reset()
            x = torch.ones(2)
            plain = torch._dynamo.explain(lambda x: (x.data_ptr(), x * 2))(x)
            assert (plain.graph_count, plain.graph_break_count) == (1, 0), plain
            found = torch.compile(pointers, backend="eager")(x)
            assert found[:3] == pointers(x)[:3] and found[0] == x.data_ptr() != 0
        check()
        torch.ones(2, device="jax")
        check()
        """
    )


def test_pointers_and_sizes_of_other_devices_are_torchs() -> None:
    base = torch.arange(6.0)
    assert torch._C.TensorBase.data_ptr(base[2:]) == base[2:].data_ptr() == base.data_ptr() + 8
    for empty in (torch.ones(0), torch.ones(3)[3:], torch.ones(2, device="meta")):
        assert empty.data_ptr() == torch._C.TensorBase.data_ptr(empty)
        assert empty.untyped_storage().nbytes() == torch._C.StorageBase.nbytes(empty.untyped_storage())
    assert torch.ones(0).untyped_storage().data_ptr() == 0
    assert torch.ones(2, device="jax").untyped_storage().resizable()  # as torch says by itself
    assert torch.ones(0, device="jax").data_ptr() == 0
    ours = torch.arange(6.0, device="jax")
    assert ours[2:].data_ptr() == ours.data_ptr() + 8 > 1 << 40
    with pytest.raises(RuntimeError):
        torch.eye(2).to_sparse().data_ptr()


def test_storages_are_constructed_as_torch_constructs_them() -> None:
    new = torch.UntypedStorage
    assert [len(s) for s in (new(), new(8), new([1, 2]), new(device="cpu"), new(size=3))] == [0, 8, 2, 0, 3]
    assert new([1, 2], device="jax").tolist() == [1, 2]
    for wrong, error in (((None,), RuntimeError), (("x",), RuntimeError), ((1, 2), TypeError)):
        with pytest.raises(error):
            new(*wrong)
    with pytest.raises(RuntimeError, match="only one or neither of 'allocator' or 'device'"):
        new(8, device="jax", allocator=1)
    with pytest.raises(RuntimeError, match="invalid device ordinal: jax:3"):
        new(8, device="jax:3")


def foreign_names(tree: ast.AST) -> set[str]:
    """Return the names that a file gives modules, classes and functions of torch and JAX."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots = [(alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            roots = [(alias.asname or alias.name, node.module) for alias in node.names]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
            roots = [(target, root_of(node.value)) for target in targets]
        else:
            continue
        names |= {name for name, path in roots if path.split(".")[0] in ("torch", "jax", "jaxlib")}
    return names


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def writes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield every place where a file sets or deletes an attribute of torch or JAX, or may."""
    foreign = foreign_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
            targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and root_of(target) in foreign:
                    yield node.lineno, ast.unparse(target)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            registers = called.endswith(("register_pytree_node", "ForkingPickler.register"))
            if called in ("setattr", "delattr") or registers:
                yield node.lineno, ast.unparse(node)


def test_writes_are_seen() -> None:
    code = """
    import torch
    from torch import nn
    from torch.autograd import Function
    Storage = torch.UntypedStorage
    torch.x = 1
    nn.Module.to = 2
    Function.apply = 3
    Storage.nbytes = 4
    del torch.Tensor.sum
    setattr(nn, name, 5)
    jax.tree_util.register_pytree_node(kind, a, b)
    ForkingPickler.register(kind, a)
    tensor._buffer = 6
    """
    assert len(list(writes(ast.parse(textwrap.dedent(code))))) == 8


OWN_WRITES = {
    (
        "registration.py",
        "delattr(sys.modules[parent], child)",
    ),  # modules of this package, after a failed import
    ("registration.py", "torch.backends.jax"),  # a new name, as torch's backends have there; it replaces none
    ("token_choice.py", "setattr(varied, name, numbers[place])"),  # a copy that nobody else has
}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT / "isthmus")))
def test_every_patch_goes_through_the_table(file: Path) -> None:
    for line, text in writes(ast.parse(file.read_text())):
        if (file.name, text) in OWN_WRITES or file.name == "patches.py":
            continue
        raise AssertionError(f"{file.name}:{line} writes {text}: use isthmus._device.torch_glue.patches")


def test_sizes_that_vary_get_no_guard() -> None:
    """torch asks fake tensors for the bytes of their storage: a patch must not turn the answer into a condition."""
    torch.zeros(1, device="jax")
    torch._dynamo.reset()
    graphs = []

    def backend(module: torch.fx.GraphModule, inputs: list[object]) -> object:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(
        lambda x: x.nonzero() + x.shape[0], backend=backend, dynamic=True, fullgraph=True
    )
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for size in (3, 5, 7):
            assert compiled(torch.ones(size)).shape == (size, 1)
    assert len(graphs) == 1
