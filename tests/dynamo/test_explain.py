"""``isthmus.explain``: what it says was compiled is what was compiled, as data, as text and as a page."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import types
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import isthmus
from isthmus._dynamo.explanation import Break, Cluster, Compiled, Explanation, Graph, Outside, Place
from isthmus._dynamo.text_tables import amount, duration, table
from isthmus.errors import MissingLowering, Unsupported


@torch.library.custom_op("test_explain::opaque", mutates_args=(), device_types="cpu")
def opaque(x: Tensor) -> Tensor:
    return x + 1


@torch.library.custom_op("test_explain::picky", mutates_args=(), device_types="cpu")
def picky(x: Tensor) -> Tensor:
    return x - 1


opaque.register_fake(torch.empty_like)
picky.register_fake(torch.empty_like)


@isthmus.lowering(torch.ops.test_explain.picky.default)
def lower_picky(x: Any) -> Any:
    raise Unsupported("never\nin two lines")


def explain_with_cpu(function: Any, *args: Any) -> Explanation:
    """Explain a function whose nodes may fall to the CPU, which tests else forbid."""
    before, isthmus.config.fallback = isthmus.config.fallback, "cpu"
    try:
        return isthmus.explain(function, options={"fallback": "cpu"})(*args)
    finally:
        isthmus.config.fallback = before


def matrix(requires_grad: bool = False) -> Tensor:
    return torch.linspace(-1, 1, 64).reshape(8, 8).to("jax").requires_grad_(requires_grad)


def line_of(function: Any, text: str) -> int:
    """Return the number of the line of a function that holds this text."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + at for at, line in enumerate(lines) if text in line]
    return found


def test_the_name_is_the_function() -> None:
    importlib.import_module("isthmus.explain")
    assert isinstance(isthmus.explain, types.FunctionType)


def plain(x: Tensor) -> Tensor:
    x.add_(1)
    return torch.tanh(torch.tanh(x @ x))


@pytest.fixture(scope="module")
def one() -> Explanation:
    return isthmus.explain(plain)(matrix())


def test_one_graph_is_one_program(one: Explanation) -> None:
    (graph,) = one.graphs
    (cluster,) = graph.steps
    assert isinstance(cluster, Cluster)
    calls = {"aten.tanh.default": 2, "aten.add.Tensor": 1, "aten.mm.default": 1, "aten.copy_.default": 1}
    assert cluster.ops == calls
    assert next(iter(cluster.ops)) == "aten.tanh.default", "the most frequent first"
    (made,) = cluster.compiled
    assert made.flops is not None
    assert made.bytes is not None
    assert made.flops >= 2 * 8**3
    assert made.bytes >= 2 * 8 * 8 * 4
    assert set(made.seconds) == {"trace", "lower", "xla"}
    assert all(seconds > 0 for seconds in made.seconds.values())
    assert sum(one.stages.values()) == pytest.approx(one.seconds)
    assert one.breaks == one.replaced == ()
    assert not one.on_cpu


def test_texts_are_of_this_program(one: Explanation) -> None:
    name = one.graphs[0].name
    assert one.graph().startswith(f"# {name}\n")
    assert "torch.ops.aten.mm.default" in one.graph()
    assert str(one.compiled[0].graph).count("aten.tanh.default(") == 2
    assert one.stablehlo().startswith(f"// {name}\n")
    assert one.stablehlo().count("stablehlo.tanh") == 2
    assert one.hlo().startswith(f"// {name}\nHloModule")
    assert re.search(r"f32\[8,8\]", one.hlo())


def test_the_text_is_a_table(one: Explanation) -> None:
    first, second, _, *rest = str(one).splitlines()
    assert first == "plain: 1 graph, 1 program, 0 nodes fell back, 0 graph breaks"
    assert re.fullmatch(
        r"the call took .+ m?s: trace .+, lower .+, XLA .+, torch and the run itself .+ m?s", second
    )
    title, heads, row = rest
    assert title == "programs"
    assert heads.split() == ["nodes", "trace", "lower", "XLA", "FLOPs", "bytes"]
    assert len(heads) == len(row)
    time = r"[\d.]+ m?s"
    assert re.fullmatch(rf"  inference \d+ +5 +{time} +{time} +{time} +[\d.]+ kFLOP +[\d.]+ k?B", row)


def test_the_function_runs_once_and_is_compiled_anew() -> None:
    x = matrix()
    compiled = torch.compile(plain, backend="isthmus")
    compiled(matrix())
    found = isthmus.explain(plain)(x)
    torch.testing.assert_close(x.cpu(), matrix().cpu() + 1)
    assert len(found.compiled) == 1
    torch.testing.assert_close(compiled(matrix()).cpu(), plain(matrix().cpu()))


def test_backward_is_shown_where_asked() -> None:
    layer = nn.Linear(8, 3).to("jax")
    plain_cpu = nn.Linear(8, 3)
    plain_cpu.load_state_dict({name: value.cpu() for name, value in layer.state_dict().items()})
    (forward,) = isthmus.explain(layer)(matrix()).graphs
    assert forward.name.startswith("forward")
    assert layer.weight.grad is None
    found = isthmus.explain(layer, backward=True)(matrix())
    assert [graph.name.split()[0] for graph in found.graphs] == ["forward", "backward"]
    assert str(found).splitlines()[-1].split()[:2] == ["all", str(sum(c.nodes for c in found.clusters))]
    plain_cpu(matrix().cpu()).sum().backward()
    torch.testing.assert_close(layer.weight.grad.cpu(), plain_cpu.weight.grad)


def test_backward_of_several_results() -> None:
    x = matrix(requires_grad=True)
    isthmus.explain(lambda x: {"a": x.sin(), "b": [x.sum(), x > 0, x.detach(), 3]}, backward=True)(x)
    torch.testing.assert_close(x.grad.cpu(), matrix().cpu().cos() + 1)


def test_backward_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no floating result of the function requires grad"):
        isthmus.explain(torch.sin, backward=True)(matrix())


def around(x: Tensor, y: Tensor) -> Tensor:
    before = (x @ x).sin()
    between = opaque(before)
    return between.cos() @ y + before


@pytest.fixture(scope="module")
def cut() -> Explanation:
    return explain_with_cpu(around, matrix(), matrix())


def test_nodes_between_the_programs(cut: Explanation) -> None:
    (graph,) = cut.graphs
    before, between, after = graph.steps
    assert isinstance(before, Cluster)
    assert isinstance(after, Cluster)
    assert set(before.ops) == {"aten.mm.default", "aten.sin.default"}
    assert set(after.ops) == {"aten.cos.default", "aten.mm.default", "aten.add.Tensor"}
    place = Place(__file__, line_of(around, "opaque(before)"))
    assert between == Outside("test_explain.opaque.default", "nothing lowers it", place)
    assert place.source == "between = opaque(before)"
    assert graph.fallbacks == (between,)
    assert [made.name for made in cut.compiled] == [before.name, after.name]
    lines = str(cut).splitlines()
    assert lines[0] == "around: 1 graph, 2 programs, 1 node fell back, 0 graph breaks"
    told = lines[lines.index("nodes outside, because nothing compiles them") + 1]
    assert "test_explain.opaque.default  x1  nothing lowers it  " in told
    assert told.endswith(f"test_explain.py:{place.line}  between = opaque(before)")
    assert cut.on_cpu == {"test_explain.opaque.default": 1}
    assert lines[-2:] == ["ran on the CPU", "  test_explain.opaque.default  1"]


def test_options_are_those_of_compile() -> None:
    with pytest.raises(Exception, match=r"no lowering for test_explain\.opaque\.default") as raised:
        isthmus.explain(around, options={"fallback": "error"})(matrix(), matrix())
    assert isinstance(getattr(raised.value, "inner_exception", raised.value), MissingLowering)


def test_a_node_that_fails_when_traced() -> None:
    def late(x: Tensor) -> Tensor:
        return picky(opaque(x.sin() * 2).cos() * 3).tan() * 4

    found = explain_with_cpu(late, matrix())
    (graph,) = found.graphs
    kinds = ["test_explain.opaque.default", "test_explain.picky.default"]
    assert [node.op for node in graph.fallbacks] == kinds
    assert graph.fallbacks[1].reason == "Unsupported: never\nin two lines"
    assert [type(step) for step in graph.steps] == [Cluster, Outside, Cluster, Outside, Cluster]
    # The first program was compiled, and again when the graph was cut for the second time.
    assert len(found.replaced) == 1
    assert "(replaced)" in str(found)
    assert "Unsupported: never  " in str(found)
    assert "in two lines" not in str(found)
    assert found.stages["xla"] == pytest.approx(
        sum(made.seconds["xla"] for made in [*found.compiled, *found.replaced])
    )


def broken(x: Tensor) -> Tensor:
    y = x.sin()
    if y.sum() > 1e9:
        return y
    return helper(y).cos()


def helper(x: Tensor) -> Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


def test_breaks_are_told_with_their_lines() -> None:
    found = isthmus.explain(broken)(matrix())
    jump, call = found.breaks
    assert jump.place == Place(__file__, line_of(broken, "1e9"))
    assert call.place == Place(__file__, line_of(helper, "graph_break()"))
    assert (jump.skipped, call.skipped) == (None, None)
    assert call.reason.startswith("Call to `torch._dynamo.graph_break()`\n")
    assert len(found.graphs) >= 3
    *_, title, first, second = str(found).splitlines()
    assert title == "graph breaks"
    assert "if y.sum() > 1e9:" in first
    assert "Python branches on a tensor (generic_jump" in first
    assert second.endswith(" torch._dynamo.graph_break()  Call to `torch._dynamo.graph_break()`")


def scaled(x: Tensor) -> Tensor:
    return x.sin() * x.shape[0]


def looped(xs: list[Tensor]) -> list[Tensor]:
    found = []
    for x in xs:
        torch._dynamo.graph_break()
        found.append(scaled(x))
    return found


def test_a_function_that_is_given_up_and_several_sizes() -> None:
    found = isthmus.explain(looped, dynamic=True)([matrix()[:6], matrix()[:5]])
    (given_up,) = found.breaks
    assert given_up.place == Place(__file__, line_of(looped, "graph_break()"))
    assert given_up.skipped == "looped"
    assert "(all of looped runs as eager does)" in str(found)
    (cluster,) = found.clusters
    assert [made.name for made in cluster.compiled] == [f"{cluster.name} [1]", f"{cluster.name} [2]"]
    assert found.stablehlo().count("tensor<5x8xf32>") > 0


def test_nothing_to_compile() -> None:
    found = isthmus.explain(lambda: 3)()
    assert found.graphs == ()
    assert str(found).startswith("<lambda>: 0 graphs, 0 programs, ")
    assert "programs\n" not in str(found)


def fake(steps: tuple[Cluster | Outside, ...], **others: Any) -> Explanation:
    """An explanation of a graph with these steps."""
    module = GraphModule(nn.Module(), torch.fx.Graph())
    fields = {"breaks": (), "seconds": 1.5, **others}
    return Explanation("fake", (Graph("forward 0", steps, module),), **fields)


def test_what_is_not_known_is_a_dash_and_what_did_not_run_says_so() -> None:
    seconds = {"trace": 0.001, "lower": 0.02, "xla": 1.0}
    unknown = Compiled("forward 0", seconds, None, None, None, None)  # type: ignore[arg-type]
    assert str(fake((Cluster("forward 0", {"aten.mm.default": 1}, (unknown,)),))).splitlines() == [
        "fake: 1 graph, 1 program, 0 nodes fell back, 0 graph breaks",
        "the call took 1.50 s: trace 1.0 ms, lower 20.0 ms, XLA 1.00 s, torch and the run itself 479.0 ms",
        "",
        "programs",
        "             nodes   trace    lower     XLA  FLOPs  bytes",
        "  forward 0      1  1.0 ms  20.0 ms  1.00 s      -      -",
    ]
    idle = str(fake((Cluster("forward 0", {"aten.mm.default": 1}, ()),)))
    assert idle.splitlines()[-1] == "  forward 0      1  not run"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "- "),
        (0, "0 B"),
        (320, "320 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9994, "9.99 kB"),
        (9996, "10.0 kB"),
        (99960, "100 kB"),
        (999499, "999 kB"),
        (999500, "1.00 MB"),
        (2.5e9, "2.50 GB"),
        (7e15, "7000 TB"),
    ],
)
def test_amounts(value: float | None, text: str) -> None:
    assert amount(value, "B") == text.strip()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.00004, "0.0 ms"), (0.0123, "12.3 ms"), (0.99999, "1.00 s"), (75.5, "75.50 s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_tables_are_aligned() -> None:
    assert table(["a", "n"], [["bcd", "1"], ["", "200"]], right=[1]) == ["a      n", "bcd    1", "     200"]
    assert table(["a"], []) == []


VOID = {"meta", "br"}
TEXT = {"html", "head", "title", "style", "body", "h1", "h2", "p", "div", "details", "summary", "pre"}
TAGS = VOID | TEXT | {"table", "tr", "th", "td"} | {"svg", "rect", "text", "path", "g"}


class Reader(HTMLParser):
    """Reads a page, and refuses tags that are not closed, not ours, or load something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.data: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        assert not {name for name, _ in attrs} & {"src", "href", "srcset", "data", "onclick", "style"}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.data.append((self.open[-1] if self.open else "", data))

    def texts(self, tag: str) -> list[str]:
        """Return what stands directly in tags of this kind."""
        return [data for where, data in self.data if where == tag]


def pictures(page: str) -> Iterator[ElementTree.Element]:
    for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        yield ElementTree.fromstring(text)


def boxes(picture: ElementTree.Element) -> list[tuple[str, float, float]]:
    """Return the kind, top and bottom of each box of a picture."""
    found = [box.attrib for box in picture.iter("rect") if box.get("class") != "bar"]
    return [(box["class"], float(box["y"]), float(box["y"]) + float(box["height"])) for box in found]


def test_the_page_shows_the_clusters(cut: Explanation, tmp_path: Path) -> None:
    cut.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    reader = Reader(page)
    assert "url(" not in page.partition("</style>")[0]
    assert "@import" not in page.partition("</style>")[0]
    assert "prefers-color-scheme: dark" in page
    (picture,) = pictures(page)
    found = boxes(picture)
    assert [kind for kind, _, _ in found] == ["program", "fell", "program"]
    assert all(above[2] < below[1] for above, below in itertools.pairwise(found))
    assert found[-1][2] <= float(picture.attrib["height"])
    assert len(list(picture.iter("path"))) == 2
    labels = reader.texts("text")
    assert any(label.startswith(f"{cut.clusters[0].name}: 2 nodes, ") for label in labels)
    assert {"aten.mm.default", "test_explain.opaque.default", "nothing lowers it"} <= set(labels)
    assert reader.texts("summary")[0] == "FX graph"
    assert len(reader.texts("summary")) == 1 + 3 * len(
        cut.compiled
    )  # of each program graph, StableHLO and HLO
    texts = "".join(reader.texts("pre"))
    for made in cut.compiled:
        assert made.stablehlo() in texts
        assert made.hlo() in texts
    assert cut.graphs[0].text() in texts
    assert "between = opaque(before)" in reader.texts("td")


def test_what_cannot_be_padded_is_named(tmp_path: Path) -> None:
    def spectrum(x: Tensor) -> Tensor:
        return torch.fft.rfft(x).abs().sum()

    x = torch.ones(6).to("jax")
    assert isthmus.explain(spectrum)(x).refused == ()
    found = isthmus.explain(spectrum, dynamic=True)(x)
    ((name, why),) = found.refused
    assert name.startswith("inference")
    assert why == "fft: of a padded axis"
    assert "compiled for each size, because they cannot be padded" in str(found)
    assert len(found.compiled) == 1
    found.save_html(tmp_path / "page.html")
    assert why in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert isthmus.explain(lambda x: x.sum(), dynamic=True)(x).refused == ()


def test_the_page_escapes_what_it_is_given(tmp_path: Path) -> None:
    evil = '<script>alert("&")</script>'
    steps = (
        Cluster(evil, {evil: 3, **{f"op{n}": 1 for n in range(12)}}, ()),
        Outside("getitem", None, None),
        Outside("getitem", None, None),
        Outside(evil, evil + "\nmore", Place(evil, 1)),
        Outside("last" * 100, "because " * 100, None),
    )
    breaks = (Break(Place(evil, 1), evil, evil),)
    explanation = fake(steps, breaks=breaks, on_cpu={evil: 2})
    explanation.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    reader = Reader(page)
    assert reader.texts("text").count(evil) == 2, "an op of the program, and a node"
    assert f"{evil}:1" in reader.texts("td")
    (picture,) = pictures(page)
    assert [kind for kind, _, _ in boxes(picture)] == ["program", "alone", "fell", "fell"]
    labels = reader.texts("text")
    assert "getitem x2" in labels
    assert "and 5 ops more" in labels
    assert max(map(len, labels)) < 100, "long lines are cut to the width of the picture"
