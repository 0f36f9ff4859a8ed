"""Is this installation healthy: versions, devices, the registry, and a training step beside the CPU's."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from isthmus import _upstream
from isthmus.errors import first_line

_SHOWN = 10


@dataclass
class Report:
    """What was found: lines to print, and the problems among them."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def say(self, name: str, text: str) -> None:
        """Add a line."""
        self.lines.append(f"{name:14} {text}")

    def problem(self, name: str, text: str) -> None:
        """Add a line that makes the installation unhealthy."""
        self.say(name, text)
        self.problems.append(f"{name}: {text}")


def examine() -> Report:
    """Run every examination; one that fails is a problem and does not stop the others."""
    report = Report()
    _guarded(report, _versions)
    fault = _upstream.jax_fault()
    if fault is not None:
        # The rest would fail with these words, too. A JAX whose version says it all has its line already.
        if not any(fault[0] in problem for problem in report.problems):
            report.problem("jax", fault[0])
        return report
    for examination in (_devices, _registry, _smoke, _libraries, _patches, _private_names):
        _guarded(report, examination)
    return report


def _guarded(report: Report, examination: Callable[[Report], None]) -> None:
    try:
        examination(report)
    except Exception as error:
        report.problem(
            examination.__name__.removeprefix("_"),
            f"failed with {type(error).__name__}: {first_line(str(error))}",
        )


def _versions(report: Report) -> None:
    report.say("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("isthmus", "torch", "jax", "jaxlib", "numpy"):
        version = _upstream.installed_version(package)
        newest = _upstream.NEWEST.get(package)
        fault = _upstream.package_fault(package) if package in _upstream.OLDEST else None
        if fault is not None:
            report.problem(package, fault)
        elif version is None:
            report.problem(package, "is not installed; to fix it: pip install isthmus")
        elif newest is not None and _upstream.release(version) > _upstream.release(newest):
            report.say(package, f"{version}, newer than {newest}, the newest that Isthmus was checked with")
        else:
            report.say(package, version)


def _devices(report: Report) -> None:
    import jax
    import torch

    from _isthmus_autoload import rival

    devices = jax.local_devices()
    kinds = ", ".join(sorted({f"{device.platform} ({device.device_kind})" for device in devices}))
    report.say("devices", f"{len(devices)} seen by JAX: {kinds}")
    report.say("torch.jax", f"{torch.device('jax', 0)} is {torch.get_device_module('jax').get_device_name()}")
    other = rival()
    if other is None:
        report.say("added by", "import torch")
    else:
        report.say(
            "added by", f"import isthmus only: torch has {other!r} here, whose place it takes in a process"
        )


def _registry(report: Report) -> None:
    from isthmus._device.torch_glue.registration import load
    from isthmus._graph.names import Missing
    from isthmus._ops.registry import refused, registry

    # Not the kernels alone: with them registered nothing would load the patches that tensors need.
    load()
    report.say("lowerings", f"{len(registry)} overloads")
    # Ops of these take their decomposition or the CPU, in another torch than the lowerings were written for.
    missing = sorted(name for name in refused if name in Missing.by_name)
    report.say("missing", _listed(missing) if missing else "none: this torch has every overload")
    changed = {name: reason for name, reason in refused.items() if name not in Missing.by_name}
    for reason in changed.values():
        report.say("refused", reason)
    if not changed:
        report.say("refused", "none: every lowering fits this torch")


def _libraries(report: Report) -> None:
    from isthmus import integrations

    lines = list(integrations.report())
    for library, line in lines:
        report.say("library", f"{library} {line}")
    if not lines:
        report.say("libraries", f"none of {', '.join(integrations.LIBRARIES)} is installed")


def _patches(report: Report) -> None:
    # After the smoke run, whose first tensor applies most rows of the table.
    from isthmus._device.torch_glue import patches

    for line in patches.report():
        report.say("patches", line)


def _private_names(report: Report) -> None:
    for name, reason in _upstream.switched_off.items():
        report.say("switched off", f"{name}: {reason}")
    if not _upstream.switched_off:
        report.say("switched off", "none: torch and JAX have every private name that Isthmus can use")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} in this torch: {', '.join(names[:_SHOWN])}{more}"


def _smoke(report: Report) -> None:
    from isthmus import metrics

    before = metrics.fallbacks()
    pairs = zip(_losses("jax"), _losses("cpu"), strict=True)
    worst = max(abs(got - want) / max(abs(want), 1.0) for got, want in pairs)
    fallen = [op for op, times in metrics.fallbacks().items() if times > before.get(op, 0)]
    if not worst < 1e-3:
        report.problem("smoke run", f"a training step on 'jax' differs from the CPU by {worst:.1e}")
    elif fallen:
        report.problem("smoke run", f"fell to the CPU: {', '.join(fallen)}")
    else:
        report.say("smoke run", f"3 training steps agree with the CPU to {worst:.0e}, none of it ran there")


def _losses(device: str) -> Iterator[float]:
    """Train a small network from fixed weights and yield the loss of each step."""
    import torch
    from torch import nn

    numbers = torch.linspace(-1, 1, 32)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.sin(torch.arange(parameter.numel()) + 1.0).reshape(parameter.shape) / 3)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, wanted = numbers.reshape(4, 8).to(device), numbers[:4].reshape(4, 1).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield loss.item()


if __name__ == "__main__":
    import sys

    from isthmus.cli import main

    sys.exit(main(["doctor", *sys.argv[1:]]))
