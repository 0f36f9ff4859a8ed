"""``isthmus.explain(fn)(*args)``: what ``torch.compile(backend="isthmus")`` makes of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus._dynamo.explanation import Explanation


def explain(fn: Callable[..., Any], *, backward: bool = False, **options: Any) -> Callable[..., Explanation]:
    """Return a function of ``fn``'s arguments that compiles ``fn``, runs it once and returns what happened.

    All that Dynamo has compiled in this process is dropped first (``torch._dynamo.reset()``), so that ``fn`` is
    compiled anew. What ``fn`` does besides returning is done, once. With ``backward=True`` the gradients of the sum
    of its floating results are computed too, and added to ``.grad`` as by any ``backward()``. ``options`` are those
    of ``torch.compile``: ``dynamic``, ``fullgraph``, ``options={...}``.
    """

    def run(*args: Any, **kwargs: Any) -> Explanation:
        from isthmus._dynamo.explanation import explained

        return explained(fn, args, kwargs, backward, options)

    return run
