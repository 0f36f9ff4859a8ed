"""What importing loads and touches: the order of the folders, lazy JAX, settings that are not ours to set."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from torch import nn

from isthmus._device.torch_glue.patches import TABLE
from tests.interpreters import forked, forked_early, fresh

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "isthmus"
FILES = sorted(PACKAGE.rglob("*.py"))

# Imports point down this list, or stay on their line; everything not named here is public and comes first.
ORDER = [
    {"public", "integrations"},
    {"_distributed"},
    {"_export", "_interop"},
    {"_dynamo", "_lazy"},
    {"_program"},
    {"_device"},
    {"_ops"},
    {"_runtime"},
    {"_graph"},
    {"_upstream"},
    {"config", "errors", "_after_import", "_caches", "_settings"},
]
# The files that may touch private names, which every new version of torch or JAX may change.
PRIVATE_TORCH = {
    "_graph/private.py",  # what every layer needs
    "_graph/promotion.py",  # apart from it, since it loads sympy
    "_device/torch_glue/private.py",
    "_device/torch_glue/pytree.py",
    "_device/torch_glue/registration.py",  # what gives torch the device, before anything else is loaded
    "_device/torch_glue/patches.py",  # the table of patches
    "_dynamo/private.py",
}
PRIVATE_JAX = {"_runtime/private.py"}
# Private attributes of torch's objects, whatever name the object has where it is used.
PRIVATE_ATTRIBUTES = {"_schema", "_overloadname", "_overloadpacket", "_cdata"}
# Private by their spelling alone: (name, or beginning of names) and why it may stand anywhere.
EXCEPTIONS = {
    "torch.ops.": "an op's name is the name of its schema, underscore or not; _graph/names.py finds it missing",
    "torch._foreach_": "functions on lists of tensors that torch documents",
    "torch.utils._python_dispatch.TorchDispatchMode": "torch's documents name it under Extending PyTorch",
}
ATTRIBUTE_CALLS = (
    "getattr",
    "hasattr",
    "setattr",
    "delattr",
    "inspect.getattr_static",
    "object.__getattribute__",
)
ROOTS = ("torch", "functorch", "jax", "jaxlib")
# What rows of the table of patches name as owners, which those who apply a row repeat.
PATCHED = {row.owner for row in TABLE}
# Names of theirs count wherever they are read, also where a class of ours has one of the same name.
THEIRS = {
    name
    for kind in (
        torch.Tensor,
        nn.Module,
        torch.optim.Optimizer,
        torch.UntypedStorage,
        torch.fx.Graph,
        jax.Array,
    )
    for name in [*dir(kind), *(vars(nn.Linear(1, 1)) if kind is nn.Module else ())]
    if name.startswith("_") and not name.startswith("__")
}
# Attributes with an underscore that are not torch's: whose they are.
OF_OTHERS = {
    "_buffer": "ours, on a storage of torch's (_device/torch_glue/private.py)",
    "_nnz": "a method of sparse tensors that torch's documents name",
    "_coalesced_": "an ATen op, as a method of sparse tensors",
    "_indices": "an ATen op, as a method of sparse tensors",
    "_values": "an ATen op, as a method of sparse tensors",
    "_departed": "ours, on a storage of torch's (_dynamo/dlpack.py)",
    "_fields": "named tuples; documented",
    "_initializing": "importlib: the spec of a module that is being imported",
    "_getframe": "sys; documented",
    "_current_frames": "sys; documented",
    "_exit": "os; documented",
    "_asdict": "named tuples; documented",
    "_name_": "enum; documented",
    "_value_": "enum; documented",
    "_extra_reducers": "multiprocessing.reduction, where torch registers its own",
    "_attn_implementation": "transformers' configuration of a model",
    "_pad_token_tensor": "transformers' configuration of a generation",
}


def layer(name: str) -> int:
    """Return the line of ORDER that a module of the package is on."""
    return next((n for n, names in enumerate(ORDER) if name in names), 0)


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield every dotted name a file imports or reads, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def imports_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield every module a file imports, with its line."""
    found = (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
    for node in found:
        yield from names_in(node)


def test_the_checks_see_what_they_should() -> None:
    tree = ast.parse(
        "import a.b\nfrom c import d\ndef f():\n  from e.f import g\n  return torch._C._x(jax._src)"
    )
    assert [name for _, name in imports_in(tree)] == ["a.b", "c.d", "e.f.g"]
    assert {"torch._C._x", "torch._C", "jax._src"} <= {name for _, name in names_in(tree)}
    assert layer("errors") > layer("_graph") > layer("_runtime") > layer("_ops")
    assert layer("_ops") > layer("_device") > layer("_dynamo") > layer("_interop") > layer("cli")


def test_every_folder_is_in_the_order() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    unknown = folders - set().union(*ORDER)
    assert not unknown, f"give {unknown} a line in ORDER"
    assert len(FILES) > 20


def trees() -> Iterator[tuple[Path, ast.AST]]:
    """Yield every file of the package with its syntax tree."""
    for file in FILES:
        yield file, ast.parse(file.read_text())


def test_imports_point_down() -> None:
    wrong = []
    for file, tree in trees():
        where = file.relative_to(PACKAGE)
        own = layer(where.with_suffix("").parts[0])
        for line, name in imports_in(tree):
            if name == "isthmus" or name.startswith("isthmus."):
                target = [*name.split("."), ""][1]
                if layer(target) < own:
                    wrong.append(f"{where}:{line} imports {name}, which is above it")
        roots = {name.split(".")[0] for _, name in imports_in(tree)}
        if where.parts[0] == "_graph" and roots & {"jax", "jaxlib"}:
            wrong.append(f"{where} imports JAX, which graphs do without")
    assert not wrong, "\n".join(wrong)


def aliases_in(tree: ast.AST) -> dict[str, str]:
    """Return the dotted name of each module of torch or JAX, or object in one, that a file gives a name of its own."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: whole for name, whole in found.items() if whole.split(".")[0] in ROOTS}


def own_names(tree: ast.AST) -> set[str]:
    """Return the names with an underscore that a file defines: its functions, classes, variables and attributes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.Assign) and "__slots__" in map(ast.unparse, node.targets):
            found.update(n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant))
    return found


def private_names_in(tree: ast.AST, own: Set[str] = frozenset()) -> Iterator[tuple[int, str, str]]:
    """Yield (line, name, "torch", "jax" or "either") of every private name a file uses.

    Names are followed through ``import torch as t`` and ``from torch import nn``. A string counts where it names a
    module or is an attribute's name (``getattr``, ``attrgetter``, a key of ``vars()``). An attribute of any other
    object counts where no file of the package defines it: ``own`` are the names that some file does. One that torch's
    classes have as well (``THEIRS``) is ours on ``self`` alone.
    """
    aliases = aliases_in(tree)
    for line, name in names_in(tree):
        first, *rest = name.split(".")
        name = ".".join([aliases.get(first, first), *rest])
        root, *rest = name.split(".")
        hidden = any(_is_private(part) for part in rest)
        if name.startswith(tuple(EXCEPTIONS)):
            continue
        if root == "jaxlib" or (root == "jax" and hidden):
            yield line, name, "jax"
        elif (root in ("torch", "functorch") and hidden) or {*rest[-1:]} & PRIVATE_ATTRIBUTES:
            yield line, name, "torch"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            base = ast.unparse(node.value)
            whole = ".".join([aliases.get(base.split(".")[0], base.split(".")[0]), *base.split(".")[1:]])
            ours = node.attr in own and (node.attr not in THEIRS or base in ("self", "cls"))
            foreign = not ours and node.attr not in OF_OTHERS
            if foreign and not f"{whole}.".startswith(("torch.", "jax.")) and not base.endswith("aten"):
                yield node.lineno, f"{base}.{node.attr}", "either"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            root, *rest = node.value.split(".")
            module = root in ROOTS and all(part.isidentifier() for part in rest) and node.value not in PATCHED
            if node.value in PRIVATE_ATTRIBUTES or (module and any(map(_is_private, rest))):
                yield node.lineno, repr(node.value), "jax" if root in ("jax", "jaxlib") else "torch"
        for base, name in attributes_by_name(node):
            if (
                _is_private(name)
                and name not in (own - THEIRS) | OF_OTHERS.keys()
                and not base.endswith("aten")
            ):
                yield getattr(node, "lineno", 0), f"{base}.{name}", "either"


def attributes_by_name(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (object, attribute) for an expression that names an attribute by a string."""
    base, names = "", []
    if isinstance(node, ast.Subscript) and _is_namespace(node.value):
        base, names = ast.unparse(node.value), [node.slice]
    elif isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        last = function.split(".")[-1]
        if function in ATTRIBUTE_CALLS and len(node.args) > 1:
            base, names = ast.unparse(node.args[0]), [node.args[1]]
        elif last in ("attrgetter", "methodcaller", "__getattr__", "__getattribute__"):
            base, names = function, node.args
        elif isinstance(node.func, ast.Attribute) and _is_namespace(node.func.value):
            base, names = function, node.args[:1]  # vars(x).get("_y")
    for name in names:
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield from ((base, part) for part in name.value.split("."))


def _is_namespace(node: ast.AST) -> bool:
    """Return whether an expression is the dict of an object's attributes: ``vars(x)`` or ``x.__dict__``."""
    text = ast.unparse(node)
    return text.startswith("vars(") or text.endswith(".__dict__")


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__") and part != "_"


PLANTED = """
import torch._dynamo.config
from torch.utils import _pytree
from torch.utils._pytree import tree_map
x = op._schema.name
x = tensor.untyped_storage()._cdata
x = attrgetter('_cdata')
import jax._src.core
x = torch._C._acc.create_empty_tensor()
import torch as t; x = t._C._x()
import jax as j; x = j._src.core
from torch import nn; x = nn.Module._apply
import torch.nn.functional as F; x = F._verify_batch_size([1])
from torch import Tensor; x = Tensor._make_subclass
from jax import lax; x = lax._convolution
import jax.numpy as jnp; x = jnp._convolve
from torch import _dynamo as d; x = d.reset()
x = getattr(torch, '_C')
x = getattr(op, '_handle')
setattr(module, '_parameters', {})
m = importlib.import_module('torch._dynamo.utils')
m = sys.modules['jax._src.core']
from jaxlib import xla_client
x = tensor._version
x = module._parameters
from functorch import _C
x = torch.__dict__['_C']
x = vars(module)['_parameters']
x = module.__dict__.get('_forward_hooks')
x = operator.attrgetter('grad_fn._saved_self')(t)
x = methodcaller('_make_subclass')(t)
x = object.__getattribute__(torch, '_C')
x = torch.__getattr__('_C')
x = inspect.getattr_static(torch, '_C')
x = storage._set_from_file
"""
PUBLIC = """
x = torch.ops.aten._softmax.default
x = torch._foreach_add([y], 1)
x = torch.nn.Linear.__init__
import jax.interpreters.partial_eval
from torch import nn; x = nn.Linear(_, 2)
x = self._ours.of_theirs + other._ours
x = getattr(self, '_ours')
x = "torch.float32 and jax._src in a sentence"
"""


def test_the_check_sees_private_names() -> None:
    lines = PLANTED.strip().splitlines()
    seen = {line for line, _, _ in private_names_in(ast.parse("\n".join(lines)))}
    assert seen == set(range(1, len(lines) + 1))
    assert list(private_names_in(ast.parse(PUBLIC), {"_ours"})) == []


def test_private_names_stay_in_their_files() -> None:
    wrong = []
    allowed = {"torch": PRIVATE_TORCH, "jax": PRIVATE_JAX, "either": PRIVATE_TORCH | PRIVATE_JAX}
    own = set().union(*(own_names(tree) for _, tree in trees()))
    for file, tree in trees():
        where = file.relative_to(PACKAGE).as_posix()
        for line, name, whose in private_names_in(tree, own):
            # A file of ``integrations`` knows the library it is for, and is loaded with it.
            of_library = whose == "either" and where.startswith("integrations/")
            if where not in allowed[whose] and not of_library:
                wrong.append(f"{where}:{line} uses {name}: it belongs in one of {sorted(allowed[whose])}")
    assert not wrong, "\n".join(wrong)


def test_only_config_reads_the_environment() -> None:
    reads = {"os.environ", "os.getenv", "os.environb", "os.putenv"}
    readers = {file.name for file, tree in trees() if reads & {name for _, name in names_in(tree)}}
    assert readers <= {"config.py"}


def python(code: str, run: Any = fresh, **environment: str) -> str:
    """Run code in another process and return what it printed."""
    ran = run(code, **environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


LOADED = """
import sys
heavy = ("jax", "jaxlib", "isthmus._ops", "isthmus._ops.registry", "isthmus._device.core.dispatch",
         "torch._dynamo", "torch._inductor", "sympy")
print([name for name in heavy if name in sys.modules])
"""


def test_import_torch_is_enough_and_loads_little() -> None:
    code = "import torch; assert torch.device('jax').type == 'jax'; torch.jax.device_count()"
    assert python(code + LOADED) == "[]"


def test_import_isthmus_loads_neither_jax_nor_dynamo() -> None:
    assert python("import isthmus; isthmus.config.fallback; isthmus.metrics.counts()" + LOADED) == "[]"


def test_the_first_tensor_loads_jax() -> None:
    loaded = python("import torch; torch.empty(2, device='jax')" + LOADED, forked_early)
    assert "'jax'" in loaded
    assert "'isthmus._ops.registry'" in loaded


def test_importing_everything_starts_no_backend() -> None:
    # Children of a process may use the device only if JAX had not started before the fork.
    code = "from isthmus._runtime import compiler; print(compiler.default_device.cache_info().currsize)"
    assert python(code, forked) == "0"


@pytest.mark.parametrize(
    "first", ["import isthmus, torch", "import torch, isthmus", "import isthmus.config, torch"]
)
@pytest.mark.parametrize("autoload", ["0", "1"])
def test_either_may_be_imported_first(first: str, autoload: str) -> None:
    code = f"{first}; print(torch.zeros(2, device='jax').sum().item())"
    assert python(code, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload) == "0.0"


def test_every_public_name_is_there() -> None:
    code = "import isthmus; print([n for n in isthmus.__all__ if not hasattr(isthmus, n)])"
    assert python(code, forked_early) == "[]"


SETTINGS = """
import json, torch

def of_torch():
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "deterministic": [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic,
                          torch.is_deterministic_algorithms_warn_only_enabled()],
        "matmul precision": torch.get_float32_matmul_precision(),
        "multithreaded backward": torch.autograd.is_multithreading_enabled(),
        "cpu rng": torch.get_rng_state().sum().item(),
        "autocast": [torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))],
        "print": str(torch._tensor_str.PRINT_OPTS),
    }
"""

USE = """
from torch import nn
import warnings; warnings.simplefilter("ignore")
x = torch.arange(12.0, dtype=torch.float64).reshape(3, 4).to("jax")
model = nn.Linear(4, 2, dtype=torch.float64)
{seeded}
model.to("jax")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(x).sum().backward()
optimizer.step()
x[1:, ::2].add_(1)
torch.zeros(3, dtype=torch.int64, device="jax").tolist()
"""


def test_using_the_device_leaves_torch_as_it_was() -> None:
    # After the layer is drawn: making one takes numbers from the CPU's generator.
    seeded = "before = of_torch()"
    code = SETTINGS + USE.format(seeded=seeded) + "print(json.dumps([before, of_torch()]))"
    before, after = json.loads(python(code, forked_early))
    assert before == after
    assert len(before) == 11


@pytest.mark.parametrize("x64", ["0", "1"])
def test_using_the_device_leaves_jax_as_it_was(x64: str) -> None:
    reads = "{name: repr(getattr(jax.config, name, None)) for name in sorted(jax.config.values)}"
    code = f"import jax; before = {reads}" + SETTINGS + USE.format(seeded="")
    code += f"print(json.dumps([before, {reads}, str(jax.numpy.arange(3).dtype)]))"
    before, after, dtype = json.loads(python(code, forked_early, JAX_ENABLE_X64=x64))
    assert before == after
    assert len(before) > 50
    assert before["jax_enable_x64"] == str(x64 == "1")
    assert dtype == ("int64" if x64 == "1" else "int32")


def test_jax_in_other_threads_is_untouched() -> None:
    code = """
    import threading, time, torch, jax, jax.numpy as jnp
    seen = set()
    stop = threading.Event()
    def watch():
        while not stop.is_set():
            seen.add(str(jnp.zeros(1, int).dtype))
    watcher = threading.Thread(target=watch)
    watcher.start()
    for n in range(1, 15):
        torch.ones(n, dtype=torch.float64).to("jax").mul(2).sum().item()
    stop.set(); watcher.join()
    print(seen)
    """
    assert python(code, forked_early, JAX_ENABLE_X64="0") == "{'int32'}"
