"""What the device did: programs compiled, transfers, and which ops fell to the CPU and why."""

from __future__ import annotations

from isthmus._runtime import counters

__all__ = ["clear", "counts", "fallbacks", "report"]


def counts() -> dict[str, int]:
    """Return every counter by name, such as ``"compilations"``."""
    return dict(counters.counts)


def fallbacks() -> dict[str, int]:
    """Return how often each op ran on the CPU, the most frequent first."""
    return dict(counters.fallbacks.most_common())


def clear() -> None:
    """Start every count anew."""
    counters.clear()


def report() -> str:
    """Return the counts as text for a person: one line each, the reason beside each fallback."""
    found = counts()
    width = max((len(name) for name in found), default=0)
    lines = [f"{name:{width}}  {found[name]:,}" for name in sorted(found)]
    fallen = fallbacks()
    lines.append("ran on the CPU:" if fallen else "ran on the CPU: nothing")
    lines += [f"  {op}  {times:,}  ({counters.reasons.get(op, '')})" for op, times in fallen.items()]
    return "\n".join(lines)
