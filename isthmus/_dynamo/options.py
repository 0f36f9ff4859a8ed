"""``torch.compile(options={...})``: every option, its default and what it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from isthmus.errors import ConfigError


def _option(default: Any, choices: tuple[Any, ...] | type, doc: str) -> Any:
    return field(default=default, metadata={"choices": choices, "doc": doc})


@dataclass(frozen=True)
class Options:
    """How one ``torch.compile`` call compiles."""

    donate: str = _option(
        "auto", ("auto", "off"), "Whether an argument that is written to gives its memory to the result."
    )
    fallback: str = _option(
        "warn",
        ("cpu", "warn", "error"),
        "What happens to a node nothing lowers: it runs outside the programs silently, with one warning, or raises.",
    )
    min_cluster: int = _option(
        2,
        int,
        "The fewest nodes worth a program of their own where a graph must be cut; fewer run one by one.",
    )
    programs: int = _option(256, int, "How many programs a graph keeps; the one not used longest is dropped.")
    freeze: bool = _option(
        False,
        (False, True),
        "Whether parameters are taken for constants and folded; for inference, in a graph that is not cut.",
    )
    blocks: str = _option(
        "auto",
        ("auto", "fuse"),
        "Whether identical blocks of a graph, such as the layers of a transformer, are compiled once and called "
        "many times, which compiles faster, or are fused into one program.",
    )
    keep: str = _option(
        "together",
        ("together", "apart"),
        "How what forward keeps for backward travels: in one tensor, which costs less, or each value in its own, where "
        "hooks on saved tensors (torch.autograd.graph.save_on_cpu) are to see them.",
    )
    xla: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "choices": dict,
            "doc": "Options for XLA's compiler, such as {'xla_cpu_use_onednn': True}.",
        },
    )


_REMOVED = {
    "shapes": "it had one value: a program is compiled for each set of sizes; leave it out",
}
_KINDS = {int: "number from 1 on", dict: "dictionary"}


def _too_small(value: Any) -> bool:
    return isinstance(value, int) and value < 1


def parse(options: Mapping[str, Any] | None) -> Options:
    """Return the options of one call, or raise with those there are."""
    known = {f.name: f for f in fields(Options)}
    for name, value in (options or {}).items():
        if name in _REMOVED:
            raise ConfigError(f'backend "isthmus" has no option {name!r} any more: {_REMOVED[name]}')
        if name not in known:
            raise ConfigError(f'backend "isthmus" has no option {name!r}; it has {", ".join(known)}')
        choices = known[name].metadata["choices"]
        # By their text, since 1 equals True.
        if isinstance(choices, tuple) and repr(value) not in map(repr, choices):
            allowed = ", ".join(repr(choice) for choice in choices)
            raise ConfigError(f"option {name!r} is {value!r}; choose from {allowed}")
        if isinstance(choices, type) and (type(value) is not choices or _too_small(value)):
            raise ConfigError(f"option {name!r} is {value!r}; it takes a {_KINDS[choices]}")
    return Options(**(options or {}))


def check_mode(mode: str | None) -> None:
    """Raise unless ``torch.compile(mode=...)`` is the only mode there is: the others are TorchInductor's."""
    if mode not in (None, "default"):
        raise ConfigError(
            f'backend "isthmus" has no mode {mode!r}; it has "default" only\n'
            f"  why          the others have TorchInductor tune kernels and use CUDA graphs; XLA does both itself\n"
            f'  instead      options={{"blocks": "fuse"}} compiles longer for a faster program, '
            f'{{"freeze": True}} folds parameters,\n'
            f'               {{"xla": {{...}}}} goes to XLA\'s compiler'
        )
