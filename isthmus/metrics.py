"""What the device did: ops recorded, programs compiled and run and why, transfers, fallbacks to the CPU.

The counters are always on and belong to the process; docs/metrics.md says what each counts.

>>> import torch, isthmus
>>> isthmus.metrics.clear()
>>> y = torch.tensor([1.0, 2.0]).to("jax")
>>> isthmus.metrics.counts()["transfers to device"]
1
>>> isthmus.metrics.fallbacks()
{}
"""

from __future__ import annotations

from typing import Any

from isthmus._runtime import counters

__all__ = ["as_dict", "clear", "counts", "fallbacks", "report"]

_STAGES = ("trace", "lower", "xla")
# The order of the report; counters that are not here follow.
_FIRST = (
    "ops recorded",
    "programs run",
    "program cache hits",
    "program cache misses",
    "compilations",
    "loaded from disk",
    *[f"seconds in {stage}" for stage in _STAGES],
    "transfers to device",
    "bytes to device",
    "transfers to host",
    "bytes to host",
)


def counts() -> dict[str, int]:
    """Return every counter by name.

    Returns:
        A dict of counts; a counter that nothing has touched is not in it.

    Example:
        >>> import torch, isthmus
        >>> isthmus.metrics.clear()
        >>> x = torch.ones(2, device="jax").cpu()
        >>> isthmus.metrics.counts()["bytes to host"]
        8
    """
    return dict(counters.counts)


def fallbacks() -> dict[str, int]:
    """Return how often each op ran on the CPU, the most frequent first.

    Returns:
        A dict of counts by op, such as ``{"aten._ctc_loss.Tensor": 3}``; empty where everything ran on the device.

    Example:
        >>> import isthmus
        >>> isthmus.metrics.clear()
        >>> isthmus.metrics.fallbacks()
        {}
    """
    return dict(counters.fallbacks.most_common())


def clear() -> None:
    """Set every count to zero.

    Example:
        >>> import isthmus
        >>> isthmus.metrics.clear()
        >>> isthmus.metrics.counts()
        {}
    """
    counters.clear()


def as_dict() -> dict[str, Any]:
    """Return everything that was counted as plain data, fit for JSON.

    Returns:
        Nested dicts with the keys ``ops recorded``, ``programs``, ``compilations``, ``transfers``,
        ``materialisations``, ``fallbacks`` and ``other``; a count of nothing is 0, not missing.

    Example:
        >>> import isthmus
        >>> isthmus.metrics.clear()
        >>> isthmus.metrics.as_dict()["compilations"]["count"]
        0
    """
    others = counts()
    named = {name: others.pop(name, 0) for name in _FIRST if not name.startswith("seconds")}
    return {
        "ops recorded": named["ops recorded"],
        "programs": {
            "run": named["programs run"],
            "hits": named["program cache hits"],
            "misses": named["program cache misses"],
        },
        "compilations": {
            "count": named["compilations"],
            "loaded from disk": named["loaded from disk"],
            "seconds": {stage: counters.seconds.get(stage, 0.0) for stage in _STAGES},
        },
        "transfers": {
            way: {"count": named[f"transfers {way}"], "bytes": named[f"bytes {way}"]}
            for way in ("to device", "to host")
        },
        "materialisations": [
            {"cause": cause, "line": line, "count": times}
            for (cause, line), times in counters.materialisations.most_common()
        ],
        "fallbacks": {
            op: {"count": times, "reason": counters.reasons.get(op, "")} for op, times in fallbacks().items()
        },
        "other": others,
    }


def report() -> str:
    """Return the counts as text for a person, with what made programs run and the reason for each fallback.

    Returns:
        The text, of several lines.

    Example:
        >>> import isthmus
        >>> isthmus.metrics.clear()
        >>> print(isthmus.metrics.report())
        ran on the CPU: nothing
    """
    rows = {name: f"{value:,}" for name, value in counts().items()}
    rows |= {f"seconds in {stage}": f"{took:.3f}" for stage, took in dict(counters.seconds).items()}
    width = max((len(name) for name in rows), default=0)
    ordered = [*[name for name in _FIRST if name in rows], *sorted(rows.keys() - set(_FIRST))]
    lines = [f"{name:{width}}  {rows[name]}" for name in ordered]
    causes = counters.materialisations.most_common()
    lines += ["programs ran because of:"] if causes else []
    lines += [f"  {cause}  {times:,}  ({line or 'no line of yours'})" for (cause, line), times in causes]
    fallen = fallbacks()
    lines.append("ran on the CPU:" if fallen else "ran on the CPU: nothing")
    lines += [f"  {op}  {times:,}  ({counters.reasons.get(op, '')})" for op, times in fallen.items()]
    return "\n".join(lines)
