"""Runs Isthmus beside a torch or JAX that has changed, in a process of its own: ``python tests/device/drift.py ...``.

``schemas CHANGE SHARE``   a share of all ops has other arguments than our lowerings and kernels were written for.
                          What is changed is our list of known schemas, so that torch itself stays consistent.
``private NAME CHANGE``    one private name is missing, is an object of another type, or takes other arguments.
                          Our own modules alone see that: their source is rewritten as it is imported.

Both then run ``program``, a little of everything, on "jax" and compare it with the CPU. Printed at the end: ``same``,
or the RegistrationError that says why there is no device.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2] / "isthmus"
PRIVATE = (
    "_graph/private.py",
    "_device/torch_glue/private.py",
    "_dynamo/private.py",
    "_runtime/private.py",
    "_device/torch_glue/registration.py",
)
SCHEMA_CHANGES = ("renamed", "added with a default", "added without a default", "removed", "retyped", "gone")
NAME_CHANGES = ("missing", "another type", "another signature")


def dotted(node: ast.AST) -> str | None:
    """Return ``torch._C.X`` for the expression that reads it."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return ".".join([node.id, *parts]) if isinstance(node, ast.Name) else None


def is_private(name: str | None) -> bool:
    """Return whether a dotted name of torch or JAX has a part that no release promises."""
    parts = (name or "").split(".")
    return parts[0] in ("torch", "jax") and any(p.startswith("_") and not p.startswith("__") for p in parts)


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a module reads or imports, each in its longest form."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner and is_private(dotted(node)):
            yield str(dotted(node))
        elif isinstance(node, ast.ImportFrom):
            yield from (n for a in node.names if is_private(n := f"{node.module}.{a.name}"))


def private_names() -> list[str]:
    """Return every private name of torch and JAX that Isthmus uses at run time, methods of a name left out."""
    found = {n for file in PRIVATE for n in names_in(ast.parse((PACKAGE / file).read_text(encoding="utf-8")))}
    return sorted(
        found - {"torch._ops.OpOverload", "torch._ops.HigherOrderOperator"}
    )  # types, for annotations


class _Rewrite(ast.NodeTransformer):
    def __init__(self, name: str) -> None:
        self.name, self.times = name, 0

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if dotted(node) != self.name:
            return self.generic_visit(node)
        self.times += 1
        return ast.copy_location(ast.Call(ast.Name("__drifted__", ast.Load()), [], []), node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        kept = [a for a in node.names if f"{node.module}.{a.name}" != self.name]
        gone = [a for a in node.names if a not in kept]
        self.times += len(gone)
        lines: list[ast.stmt] = [ast.ImportFrom(node.module, kept, node.level)] if kept else []
        for alias in gone:
            target = ast.Name(alias.asname or alias.name, ast.Store())
            lines.append(ast.Assign([target], ast.Call(ast.Name("__drifted__", ast.Load()), [], [])))
        return [ast.copy_location(line, node) for line in lines]


def _drifted(name: str, change: str) -> Callable[[], Any]:
    def missing() -> Any:
        raise AttributeError(f"no attribute {name!r}")

    def changed(*, an_argument_nobody_passes: Any) -> Any:
        return None

    return {"missing": missing, "another type": lambda: object(), "another signature": lambda: changed}[
        change
    ]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the modules with private names from a rewritten source."""

    def __init__(self, name: str, change: str) -> None:
        self.name, self.answer, self.times = name, _drifted(name, change), 0

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        file = fullname.removeprefix("isthmus.").replace(".", "/") + ".py"
        if fullname.startswith("isthmus.") and file in PRIVATE:
            return importlib.util.spec_from_file_location(fullname, PACKAGE / file, loader=self)
        return None

    def exec_module(self, module: Any) -> None:
        """Run the module with the name changed."""
        rewrite = _Rewrite(self.name)
        tree = rewrite.visit(ast.parse(Path(module.__spec__.origin).read_text(encoding="utf-8")))
        self.times += rewrite.times
        module.__dict__["__drifted__"] = self.answer
        exec(compile(ast.fix_missing_locations(tree), module.__spec__.origin, "exec"), module.__dict__)


def change_schemas(change: str, share: float) -> None:
    """Make our list of schemas, or our names of ops, what they would be if torch had changed."""
    from isthmus._graph import names
    from isthmus._graph.schema import schema_of
    from isthmus._ops import known_schemas

    chance = random.Random(0)
    forms = known_schemas.known_forms()
    chosen = {op for op in forms if chance.random() < share}
    if change == "gone":
        chosen -= known_schemas.NEEDED
        original = names._Packet.__getattr__

        def get(self: Any, overload: str) -> Any:
            name = f"{self._namespace}.{self._name}.{overload}"
            return names.Missing(name) if name in chosen else original(self, overload)

        names._Packet.__getattr__ = get  # type: ignore[method-assign]
        return
    for name in chosen:
        space, packet, overload = name.split(".")
        op = getattr(getattr({"aten": names.aten, "prims": names.prims}[space], packet), overload)
        if not isinstance(op, names.Missing):
            forms[name] = [_before(change, schema_of(op).arguments)]


def _before(change: str, arguments: Any) -> tuple[tuple[str, str], ...]:
    """Return the form that today's arguments are a change of."""
    form = [(a.name, a.type) for a in arguments]
    if not form or change == "removed":
        return (*form, ("lost", "int"))
    if change == "renamed":
        return (*form[:-1], ("another_name", form[-1][1]))
    if change == "retyped":
        return (*form[:-1], (form[-1][0], "Device"))
    with_default = [n for n, a in enumerate(arguments) if a.has_default]
    without = [n for n, a in enumerate(arguments) if not a.has_default]
    dropped = (with_default if change == "added with a default" else without)[-1:]
    return tuple(pair for n, pair in enumerate(form) if n not in dropped)


def program(device: str) -> list[Any]:
    """Return results of a little of everything, as CPU tensors and numbers."""
    import io

    import torch
    from torch import nn

    import isthmus

    torch.manual_seed(0)
    results: list[Any] = []
    x = torch.linspace(-2, 2, 24).reshape(4, 6).to(device)
    x[:, 1] += 1
    x.T[2].mul_(2)
    results += [
        x[1:, ::2].softmax(-1),
        torch.cat([x, x.exp()]).sort(descending=True).values,
        x.std(),
        x.argmax(1),
    ]
    results += [torch.cdist(x, x.flip(0)), torch.where(x > 0, x, 0.5), x.cumsum(0), x[x > 0], x.bool().any()]
    results += [
        torch.arange(3, device=device) * 2,
        torch.stack([x, x]).permute(2, 0, 1).contiguous(),
        x.long(),
    ]
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.sin(torch.arange(parameter.numel()) + 1.0).reshape(parameter.shape) / 3)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    labels = torch.tensor([0, 2, 1, 0]).to(device)

    def step() -> Any:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    results += [step(), step()]
    on_cpu = device == "cpu"
    if on_cpu:
        results += [step(), step(), step()]
    else:
        with isthmus.lazy():
            results.append(step())
            isthmus.sync()
        # isthmus.jit refuses a step that has to leave the device, and says so.
        results.append(step() if "schemas" in sys.argv else isthmus.jit(step)())
        results.append(step())
    forward = model if on_cpu else torch.compile(model, backend="isthmus")
    out = forward(x)
    out.square().sum().backward()
    results += [out, model[0].weight.grad]
    attended = nn.functional.scaled_dot_product_attention(
        *(x.reshape(1, 1, 4, 6) for _ in range(3)), is_causal=True
    )
    results.append(attended)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    results += list(torch.load(file, weights_only=True).values())
    y = x.clone().requires_grad_()
    if on_cpu:
        sine = torch.sin(y).sum()
    else:
        import jax

        sine = isthmus.jax_function(jax.numpy.sin)(y).sum()
    sine.backward()
    results += [sine, y.grad, x[0, 0].item()]
    return [r.detach().cpu() if isinstance(r, torch.Tensor) else r for r in results]


def compare() -> None:
    """Run the program on both devices and compare; raise where they differ."""
    import torch

    import isthmus

    isthmus.config.fallback = "cpu"
    for n, (ours, theirs) in enumerate(zip(program("jax"), program("cpu"), strict=True)):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4, msg=lambda m, n=n: f"result {n}: {m}")


def torch_in_jax() -> None:
    """Differentiate a module inside jax.jit, where private names of JAX are used."""
    import jax
    import jax.numpy as jnp
    from torch import nn

    import isthmus

    params, apply = isthmus.functional(nn.Linear(4, 2))
    gradient = jax.jit(jax.grad(lambda p, x: apply(p, x).sum()))(params, jnp.ones((8, 4)))
    assert jnp.allclose(gradient["weight"], 8.0)


def main() -> None:
    """Change what the command line names and run."""
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    finder = None
    what, *rest = sys.argv[1:]
    if what == "private":
        finder = Finder(*rest)
        sys.meta_path.insert(0, finder)
    warnings.simplefilter("ignore")
    import torch  # must succeed whatever is wrong with the device

    assert torch.ones(2).sum().item() == 2
    try:
        from isthmus import _upstream
        from isthmus._ops import registry  # before any lowering

        if what == "schemas":
            change_schemas(rest[0], float(rest[1]))
        torch.zeros(1, device="jax")
    except Exception as error:
        if type(error).__name__ not in ("RegistrationError", "RuntimeError"):
            raise
        print(f"no device: {type(error).__name__}: {str(error).splitlines()[0]}")
        return
    compare()
    if what == "private":
        torch_in_jax()
        assert finder is not None
        assert finder.times, f"nothing reads {rest[0]}"
    print(f"same; refused {len(registry.refused)}; switched off {sorted(_upstream.switched_off)}")


if __name__ == "__main__":
    main()
