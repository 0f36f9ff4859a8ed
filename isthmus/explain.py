"""``isthmus.explain(fn)(*args)``: what ``torch.compile(backend="isthmus")`` makes of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus._dynamo.explanation import Explanation


def explain(fn: Callable[..., Any], *, backward: bool = False, **options: Any) -> Callable[..., Explanation]:
    """Show what ``torch.compile(backend="isthmus")`` makes of a function: graphs, programs, fallbacks, graph breaks.

    Everything that Dynamo has compiled in this process is dropped first (``torch._dynamo.reset()``), so that ``fn`` is
    compiled anew. It runs once, with its side effects.

    Arguments:
        fn: the function or module to compile.
        backward: whether to compute the gradients of the sum of its floating results too; they are added to
            ``.grad`` as by any ``backward()``.
        options: keyword arguments of ``torch.compile``: ``dynamic``, ``fullgraph``, ``options={...}``.

    Returns:
        A function of the arguments of ``fn``. It returns an ``Explanation``: ``print`` shows it, ``save_html(path)``
        writes it, and ``graphs``, ``breaks``, ``stablehlo()`` and ``hlo()`` are its parts.

    Example:
        >>> import torch, isthmus
        >>> x = torch.ones(8, device="jax")
        >>> explanation = isthmus.explain(lambda x: (x.sin() + 1).sum())(x)
        >>> len(explanation.graphs), len(explanation.breaks)
        (1, 0)
        >>> "stablehlo.sine" in explanation.stablehlo()
        True
    """
    if not callable(fn):
        raise TypeError(f"isthmus.explain takes a function or a module, not {type(fn).__name__}")

    def run(*args: Any, **kwargs: Any) -> Explanation:
        from isthmus._dynamo.explanation import explained

        return explained(fn, args, kwargs, backward, options)

    return run
