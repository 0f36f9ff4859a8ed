"""``torch.compile(backend="isthmus", options={...})``: every option, its default and what it does.

Declared and checked as the settings of ``isthmus.config`` are (``isthmus/_settings.py``); docs/settings.md lists both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isthmus import config
from isthmus._settings import check, setting
from isthmus.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """How one ``torch.compile`` call compiles."""

    donate: str = setting(
        "auto",
        "Whether an argument that is written to gives its memory to the result.",
        choices=("auto", "off"),
    )
    fallback: str = setting(
        "warn",
        "What happens to a node that no lowering or decomposition covers: it runs outside the programs silently, with "
        "one warning, or raises.",
        choices=("cpu", "warn", "error"),
    )
    min_cluster: int = setting(
        2, "The fewest nodes worth a program of their own where a graph must be cut; fewer run one by one."
    )
    programs: int = setting(256, "How many programs a graph keeps; the least recently used is dropped.")
    freeze: bool = setting(
        False,
        "Whether parameters are taken for constants and folded: for inference, in a graph that is not cut. Later "
        "changes to a parameter go unseen.",
        choices=(False, True),
    )
    blocks: str = setting(
        "auto",
        "Whether identical blocks of a graph, such as the layers of a transformer, are compiled once and called "
        "many times, which compiles faster, or are fused into one program.",
        choices=("auto", "fuse"),
    )
    keep: str = setting(
        "together",
        "How the residuals that forward saves for backward travel: in one tensor, which costs less, or each in its "
        "own, where hooks on saved tensors (`torch.autograd.graph.save_on_cpu`) are to see them.",
        choices=("together", "apart"),
    )
    shapes: str = setting(
        "config",
        "What is compiled for sizes that change: a program per size, or programs for ranges of sizes, from the second "
        "size of a graph on or at once; as `isthmus.config.shapes` says where it is left out.",
        choices=("config", "exact", "auto", "ranges"),
    )
    xla: dict[str, Any] = setting(  # noqa: RUF009
        {}, "Options for XLA's compiler, such as `{'xla_cpu_use_onednn': True}`.", kind="a dictionary"
    )

    @property
    def ranged(self) -> bool:
        """Whether programs for ranges of sizes are made."""
        return self._shapes != "exact"

    @property
    def at_once(self) -> bool:
        """Whether not even the first size is compiled exactly, where Dynamo says which sizes may change."""
        return self._shapes == "ranges"

    @property
    def _shapes(self) -> str:
        return config.shapes if self.shapes == "config" else self.shapes


def parse(options: Mapping[str, Any] | None) -> Options:
    """Return the options of one call; raise ConfigError for a name or a value that there is not."""
    options = options or {}
    for name, value in options.items():
        check(Options, name, value, unknown='backend "isthmus" has no option', assigned=f'options["{name}"]')
    return Options(**options)


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
