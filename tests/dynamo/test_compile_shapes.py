"""torch.compile(backend="isthmus"): sizes and numbers that change, sizes found in data, options and modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from isthmus._dynamo.options import Options
from isthmus._dynamo.program import _gather
from isthmus.errors import ConfigError

SIZES = [2, 3, 5, 4, 7, 8, 6, 9, 12, 10, 11, 16, 13, 14, 15, 17, 20, 18, 31, 32]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **others: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="isthmus", **others)


def numbers(*shape: int, device: str = "cpu") -> Tensor:
    """Return distinct numbers around zero, the same on every device."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count).reshape(shape) * 7 % 19) / 9.5 - 1).to(device)


def same(got: Any, want: Any, device: str) -> None:
    """Compare a result with that of the CPU; tensors must be on the device."""
    if isinstance(want, Tensor):
        assert got.device.type == device
        torch.testing.assert_close(got.detach().cpu(), want.detach(), equal_nan=True)
    elif isinstance(want, (list, tuple)):
        assert type(got) is type(want)
        for one, other in zip(got, want, strict=True):
            same(one, other, device)
    else:
        assert type(got) is type(want)
        assert got == want


def row(place: int, *values: Any) -> Any:
    """Return a row of a table; a quarter of the places is not slow."""
    return pytest.param(*values, marks=[] if place % 4 == 0 else [pytest.mark.slow])


def rows(names: Iterable[str], *ways: tuple[Any, ...]) -> Iterator[Any]:
    """Yield each name in each way; those that are not slow differ from way to way."""
    for place, name in enumerate(names):
        for turn, way in enumerate(ways):
            yield row(place + turn, name, *way)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


# ---- sizes that change


def written(x: Tensor) -> Tensor:
    x[1:] *= 2
    return x


def loop(x: Tensor) -> Tensor:
    return torch.stack([x[:2].sum() * i for i in range(3)])


BATCHES: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": lambda x: (x * 2 + 1).relu(),
    "mean of a batch": lambda x: x.mean(0) * x.shape[0],
    "softmax": lambda x: x.softmax(0) @ torch.ones_like(x[0]),
    "reshape": lambda x: x.reshape(-1, 2, 3).transpose(0, 1).reshape(2, -1),
    "views": lambda x: (x[1:], x.t(), (x + 1)[: x.shape[0] // 2]),
    "concatenate": lambda x: torch.cat([x, x + 1, x[:1]]),
    "arange": lambda x: torch.arange(x.shape[0], device=x.device) * 2,
    "mask": lambda x: torch.ones(x.shape[0], x.shape[0], device=x.device).tril() @ x,
    "pad": lambda x: F.pad(x, (1, x.shape[0])),
    "written": written,
    "sizes returned": lambda x: (x.shape, x.shape[0] * 2, x.numel(), x + 1, x.stride()),
    "expand": lambda x: x[:, None].expand(-1, x.shape[0], -1).sum(1),
    "index": lambda x: x[torch.arange(x.shape[0] - 1, -1, -1, device=x.device)],
    "loop": loop,
    "full": lambda x: x.new_full((x.shape[0],), x.shape[0]),
    "scaled by a size": lambda x: x / x.shape[0] ** 0.5,
    "topk": lambda x: x.topk(2, 0),
}


@pytest.mark.parametrize(
    ("name", "device"),
    [*rows(BATCHES, ("jax",)), *rows(["written", "views", "sizes returned"], ("cpu",))],
)
def test_many_batch_sizes(name: str, device: str) -> None:
    function = compiled(BATCHES[name], dynamic=True)
    for size in (4, 5, 7):  # torch makes a graph of its own for sizes of one
        same(function(numbers(size, 6, device=device)), BATCHES[name](numbers(size, 6)), device)
    assert graphs() <= 2


@pytest.mark.parametrize(
    ("how", "device", "sizes"),
    [
        pytest.param("dynamic=True", "jax", SIZES, marks=pytest.mark.slow),
        ("mark_dynamic", "jax", SIZES[:6]),
        pytest.param("automatic", "jax", SIZES[:6], marks=pytest.mark.slow),
        ("dynamic=True", "cpu", SIZES[:6]),
    ],
    ids=str,
)
def test_dynamo_compiles_at_most_twice(how: str, device: str, sizes: list[int]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    twin = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    twin.load_state_dict(model.state_dict())
    twin.to(device)
    function = compiled(twin, dynamic=True if how == "dynamic=True" else None)
    for size in sizes:
        model.zero_grad()
        twin.zero_grad()
        x, y = numbers(size, 4).requires_grad_(), numbers(size, 4, device=device).requires_grad_()
        if how == "mark_dynamic":
            torch._dynamo.mark_dynamic(y, 0)
        want, got = model(x), function(y)
        same(got, want, device)
        want.square().mean().backward()
        got.square().mean().backward()
        same(y.grad, x.grad, device)
        same([p.grad for p in twin.parameters()], [p.grad for p in model.parameters()], device)
    assert graphs() <= 2


def test_two_dynamic_sizes() -> None:
    function = compiled(lambda x, y: (x @ y).sum(0) + x.shape[1], dynamic=True)
    for n, k, m in [(2, 3, 4), (5, 2, 3), (3, 3, 3), (4, 4, 2), (7, 5, 6)]:
        x, y = numbers(n, k), numbers(k, m)
        same(function(x.to("jax"), y.to("jax")), (x @ y).sum(0) + k, "jax")


@pytest.mark.parametrize("size", [0, 1])
def test_sizes_zero_and_one(size: int) -> None:
    function = compiled(lambda x: (x * 2, x.sum(0), x.t()), dynamic=True)
    for n in (3, size, 4, size):
        x = numbers(n, 2)
        same(function(x.to("jax")), (x * 2, x.sum(0), x.t()), "jax")


def test_equal_sizes_that_part() -> None:
    function = compiled(lambda x, y: torch.cat([x, y]).sum(0), dynamic=True)
    for n, m in [(3, 3), (3, 4), (5, 5), (2, 6)]:
        x, y = numbers(n, 2), numbers(m, 2)
        same(function(x.to("jax"), y.to("jax")), torch.cat([x, y]).sum(0), "jax")


def test_offset_and_strides_that_change() -> None:
    function = compiled(lambda x: (x * 2, x[1:]), dynamic=True)
    for n, start, step in [(8, 0, 1), (9, 1, 1), (12, 2, 2), (12, 0, 3), (20, 3, 2)]:
        x, y = numbers(n, 3), numbers(n, 3, device="jax")
        got, want = function(y[start::step]), (x[start::step] * 2, x[start::step][1:])
        same(got, want, "jax")
        assert got[1].untyped_storage()._cdata == y.untyped_storage()._cdata


# ---- numbers that change


def scaled(x: Tensor, n: Any) -> Any:
    return x * n, x + n, n * 2


def sliced(x: Tensor, n: int) -> Tensor:
    return x[n:] * 2


def powered(x: Tensor, n: Any) -> Tensor:
    return x.abs().pow(n)


def chosen(x: Tensor, n: Any) -> Tensor:
    return x + 1 if n > 2 else x - 1


def rolled(x: Tensor, n: int) -> Tensor:
    return x.roll(n, 0)


def optional(x: Tensor, n: Any) -> Tensor:
    return x if n is None else x * n


NUMBERS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "int": (scaled, [2, 3, 4, 5, 0, 1, -7]),
    "float": (scaled, [2.5, 3.5, 0.0, -1.0, 1.0, 1e-8, 7.25]),
    "bool": (scaled, [True, False, True]),
    "int, bool and float": (scaled, [1, True, 1.0, 0, False, 0.0, 2, 2.0]),
    # Dynamo's guards take 0.0 for -0.0 until the number is known to change.
    "signed zero": (lambda x, n: torch.copysign(x, n * torch.ones_like(x)), [1.5, 2.5, 0.0, -0.0, 0.0]),
    "infinity": (lambda x, n: x.clamp(max=n), [1.0, 0.5, float("inf"), float("-inf"), 0.25]),
    "nan": (lambda x, n: torch.where(x > 0, x, n), [1.5, float("nan"), 2.5, float("nan")]),
    "slice": (sliced, [0, 1, 2, 3, -1]),
    "exponent": (powered, [2, 3, 0.5, 1.5, 2.5, 0]),
    "condition": (chosen, [1, 2, 3, 4, 5]),
    "float condition": (chosen, [1.5, 2.5, 3.5, 0.5]),
    "shift": (rolled, [1, 2, 3, 4, -1]),
    "None or a number": (optional, [None, 2, None, 3.5]),
    "large int": (lambda x, n: torch.full((2,), n, device=x.device), [2**40, 2**53 + 1, -(2**62), 7]),
    "string": (lambda x, n: F.interpolate(x[None, None], scale_factor=2.0, mode=n), ["nearest", "bilinear"]),
}


@pytest.mark.parametrize(
    ("name", "device", "dynamic"), rows(NUMBERS, ("jax", None), ("jax", True), ("cpu", None))
)
def test_numbers_that_change(name: str, device: str, dynamic: bool | None) -> None:
    plain, given = NUMBERS[name]
    function = compiled(plain, dynamic=dynamic)
    x = numbers(5, 3)
    for n in given:
        same(function(x.to(device), n), plain(x, n), device)


def test_a_learning_rate_that_changes_compiles_little() -> None:
    from isthmus import metrics

    p, g = numbers(4, device="jax"), torch.ones(4, device="jax")
    function = compiled(lambda p, g, lr: p.sub_(g * lr))
    want = numbers(4)
    for step in range(3):
        function(p, g, 0.5 + step)
        want -= 0.5 + step
    before = metrics.counts()["compilations"]
    for step in range(20):
        function(p, g, 0.01 * step)
        want -= 0.01 * step
    same(p, want, "jax")
    assert metrics.counts()["compilations"] == before


# ---- sizes found in data


def nonzero(x: Tensor) -> Tensor:
    return (x > 0).nonzero() * 2


def picked(x: Tensor) -> Tensor:
    return (x[x > 0] * 2).sum(0, keepdim=True)


def item(x: Tensor) -> Any:
    n = x.abs().sum().item()
    return x * n, n > 1


def item_size(x: Tensor) -> Tensor:
    n = int((x > 0).sum().item())
    return torch.zeros(n, device=x.device) + 1


def branch(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x - 1


def listed(x: Tensor) -> Any:
    return (x > 0).sum(0).tolist(), x * 2


def unique(x: Tensor) -> Any:
    return (x * 4).round().unique(return_counts=True)


def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave((x[:, 0] > 0).long() + 1, 0)


def printed(x: Tensor) -> Tensor:
    y = x * 2
    str(y.shape)
    len(repr(y))
    return y + 1


def numpy(x: Tensor) -> Any:
    return float((x * 2).cpu().numpy().sum()), x + 1


DATA: dict[str, Callable[[Tensor], Any]] = {
    "nonzero": nonzero,
    "mask": picked,
    "item": item,
    "item as size": item_size,
    "branch": branch,
    "list": listed,
    "unique": unique,
    "repeat": repeated,
    "print": printed,
    "numpy": numpy,
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0.1) + 1,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "device", "capture"), rows(DATA, ("jax", False), ("jax", True), ("cpu", False))
)
def test_sizes_found_in_data(name: str, device: str, capture: bool) -> None:
    config = {"capture_scalar_outputs": capture, "capture_dynamic_output_shape_ops": capture}
    with torch._dynamo.config.patch(config):
        function = compiled(DATA[name])
        for sign in (1, -1):
            x = numbers(5, 3) * sign
            same(function(x.to(device)), DATA[name](x), device)


# ---- options and modes

GIVEN: list[tuple[str, Any]] = [
    ("donate", "auto"),
    ("donate", "off"),
    ("fallback", "cpu"),
    ("fallback", "warn"),
    ("fallback", "error"),
    ("min_cluster", 1),
    ("min_cluster", 100),
    ("programs", 1),
    ("freeze", False),
    ("freeze", True),
    ("blocks", "fuse"),
    ("blocks", "auto"),
    ("keep", "together"),
    ("keep", "apart"),
    ("shapes", "config"),
    ("shapes", "exact"),
    ("shapes", "auto"),
    ("xla", {}),
    ("xla", {"xla_embed_ir_in_executable": True}),
]


MODES = ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "fast"]


def test_every_option_is_given_somewhere() -> None:
    assert {name for name, _ in GIVEN} == {field.name for field in fields(Options)}


@pytest.mark.parametrize(("name", "value"), [row(at, *each) for at, each in enumerate(GIVEN)], ids=str)
def test_option_is_accepted(name: str, value: Any) -> None:
    function = compiled(lambda x: (x * 2).sin(), options={name: value})
    for size in (3, 4, 3):
        same(function(numbers(size, device="jax")), (numbers(size) * 2).sin(), "jax")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"donte": "off"}, r"no option 'donte'; did you mean donate\? It has donate, fallback"),
    ({"donate": "of"}, r"options\[\"donate\"\] = 'of' is not a choice; choose from 'auto', 'off'"),
    ({"donate": True}, r"options\[\"donate\"\] = True is not a choice; choose from 'auto', 'off'"),
    (
        {"fallback": "gpu"},
        r"options\[\"fallback\"\] = 'gpu' is not a choice; choose from 'cpu', 'warn', 'error'",
    ),
    ({"min_cluster": "2"}, r"options\[\"min_cluster\"\] = '2' is not a positive integer"),
    ({"min_cluster": True}, r"options\[\"min_cluster\"\] = True is not a positive integer"),
    ({"min_cluster": -1}, r"options\[\"min_cluster\"\] = -1 is not a positive integer"),
    ({"programs": 0}, r"options\[\"programs\"\] = 0 is not a positive integer"),
    ({"programs": 2.0}, r"options\[\"programs\"\] = 2.0 is not a positive integer"),
    ({"freeze": "yes"}, r"options\[\"freeze\"\] = 'yes' is not a choice; choose from False, True"),
    ({"freeze": 1}, r"options\[\"freeze\"\] = 1 is not a choice; choose from False, True"),
    ({"freeze": []}, r"options\[\"freeze\"\] = \[\] is not a choice; choose from False, True"),
    ({"blocks": None}, r"options\[\"blocks\"\] = None is not a choice; choose from 'auto', 'fuse'"),
    (
        {"shapes": "bucketed"},
        r"options\[\"shapes\"\] = 'bucketed' is not a choice; choose from 'config', 'exact'",
    ),
    ({"xla": "fast"}, r"options\[\"xla\"\] = 'fast' is not a dictionary"),
]


@pytest.mark.parametrize(("options", "words"), BAD, ids=[str(options) for options, _ in BAD])
def test_a_bad_option_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, torch._dynamo.exc.BackendCompilerFailed), match=words):
        compiled(lambda x: x * 2, options=options)(numbers(3, device="jax"))


@pytest.mark.parametrize("mode", [None, "default"])
def test_the_default_mode_is_accepted(mode: str | None) -> None:
    function = compiled(lambda x: (x * 2).sin(), mode=mode)
    same(function(numbers(3, device="jax")), (numbers(3) * 2).sin(), "jax")


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_another_backend_are_refused(mode: str) -> None:
    words = rf"no mode '{mode}'; it has \"default\" only"
    with pytest.raises((ConfigError, torch._dynamo.exc.BackendCompilerFailed), match=words):
        compiled(lambda x: x * 2, mode=mode)(numbers(3, device="jax"))


def test_programs_are_dropped_and_made_again() -> None:
    from isthmus import metrics

    function = compiled(lambda x: x * 2, dynamic=True, options={"programs": 2, "shapes": "exact"})
    for size in (3, 4):
        function(numbers(size, device="jax"))
    before = metrics.counts()["compilations"]
    for _ in range(3):
        for size in (3, 4):
            function(numbers(size, device="jax"))
    assert metrics.counts()["compilations"] == before
    for size in (5, 6):
        function(numbers(size, device="jax"))
    assert metrics.counts()["compilations"] == before + 2
    same(function(numbers(3, device="jax")), numbers(3) * 2, "jax")
    assert metrics.counts()["compilations"] == before + 3
    function(numbers(6, device="jax"))
    assert metrics.counts()["compilations"] == before + 3


def test_the_program_used_longest_ago_is_dropped() -> None:
    from isthmus import metrics

    function = compiled(lambda x: x * 2, dynamic=True, options={"programs": 2, "shapes": "exact"})
    for size in (3, 4, 3, 5):
        function(numbers(size, device="jax"))
    before = metrics.counts()["compilations"]
    function(numbers(3, device="jax"))
    assert metrics.counts()["compilations"] == before


def test_an_option_of_one_call_is_not_that_of_another() -> None:
    @torch.library.custom_op("isthmus_tests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    x = numbers(3, device="jax")
    with pytest.raises(Exception, match=r"no lowering for isthmus_tests.twice"):
        compiled(lambda x: twice(x + 1), options={"fallback": "error"})(x)
    torch._dynamo.reset()
    got = compiled(lambda x: twice(x + 1), options={"fallback": "cpu"})(x)
    same(got, (numbers(3) + 1) * 2, "jax")


def test_numbers_that_are_equal_but_not_the_same_are_other_programs() -> None:
    keys = [tuple(_gather([number])[0]) for number in (0.0, -0.0, 0, False, 1, 1.0, True)]
    assert len(set(keys)) == len(keys)
