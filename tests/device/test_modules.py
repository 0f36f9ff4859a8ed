"""Every module of torch's module_db on the device against the CPU: results, gradients, copies."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

from tests.conformance.trial import Trial
from tests.conformance.values import PLACES, gradients, leaves
from tests.conformance.verdict import Entry, Verdict, chosen, judge

Do = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], list[Any]]


def results(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return what the module gives, and its buffers afterwards."""
    return leaves([module(*args, **kwargs), list(module.buffers())])


def differentiated(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the gradients of the inputs and of every parameter."""
    given = [t for t in leaves([args, kwargs]) if isinstance(t, torch.Tensor) and t.requires_grad]
    outputs = [t for t in leaves(module(*args, **kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    return leaves(gradients(outputs, given + [p for p in module.parameters() if p.requires_grad]))


def copies(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return what a deep copy, a pickled one and a saved and loaded one give."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    twins = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded]
    return leaves([results(twin, args, kwargs) for twin in twins])


KINDS: dict[str, tuple[Do, bool]] = {
    "train": (results, True),
    "eval": (results, False),
    "gradient": (differentiated, True),
    "eval gradient": (differentiated, False),
    "copies": (copies, False),
}


def parameters() -> Iterator[Any]:
    """Yield the tests: of each module's ten two are not slow, which by its name, so that others leave it as it is."""
    for info in module_db:
        dtypes = [d for d in info.dtypes if d in (torch.float32, torch.float64)]
        mine = [(kind, dtype) for dtype in dtypes for kind in KINDS]
        first = zlib.crc32(info.name.encode())
        quick = {(first + step) % len(mine) for step in (0, 3)}  # of two kinds
        for turn, (kind, dtype) in enumerate(mine):
            entry = Entry("module_db", info.name, kind, str(dtype).removeprefix("torch."))
            marks = [] if turn in quick else [pytest.mark.slow]
            yield pytest.param(info, dtype, entry, id=str(entry), marks=marks)


def build(info: ModuleInfo, sample: ModuleInput, train: bool, dtype: torch.dtype) -> torch.nn.Module:
    """Return the module on the CPU, its parameters filled and its lazy ones made."""
    module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
    module = module.to(dtype).train(train)
    if info.is_lazy:
        module(*PLACES["cpu"](sample.forward_input.args), **PLACES["cpu"](sample.forward_input.kwargs))
    return module


def at(place: str, do: Do, module: torch.nn.Module, sample: ModuleInput) -> list[Any]:
    """Run a copy of the module on copies of the inputs, in one place."""
    twin = copy.deepcopy(module)
    twin = twin.double() if place == "wide" else twin.to(place)
    move = PLACES[place]
    return do(twin, move(sample.forward_input.args), move(sample.forward_input.kwargs))


@pytest.mark.parametrize(("info", "dtype", "entry"), parameters())
def test_module(
    info: ModuleInfo, dtype: torch.dtype, entry: Entry, record_property: Any, limit: int | None
) -> None:
    do, train = KINDS[entry.kind]
    verdict = Verdict(entry)
    torch.manual_seed(zlib.crc32(str(entry).encode()))
    samples = info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(chosen(samples, entry, limit)):
            module = build(info, sample, train, dtype)
            Trial(lambda place, m=module, s=sample: at(place, do, m, s)).run(verdict, number)
    judge(verdict, record_property)
