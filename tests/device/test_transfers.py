"""Elements between devices: exact in every dtype and layout, and never shared with what they came from."""

import jax
import numpy as np
import pytest
import torch

from isthmus import metrics

DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1),
    "strided": lambda t: t[::2, 1:],
    "offset": lambda t: t[1],
    "expanded": lambda t: t[:1].expand(3, *t.shape[1:]),
    "scalar": lambda t: t[0, 0],
    "empty": lambda t: t[2:2],
}


def filled(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 100, (4, 6), generator=generator)
    return raw > 50 if dtype == torch.bool else raw.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two CPU tensors hold the same bytes; some dtypes cannot be compared by torch."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back(dtype: torch.dtype, layout: str) -> None:
    source = LAYOUTS[layout](filled(dtype))
    there = source.to("jax")
    assert there.device.type == "jax"
    assert there.dtype == dtype
    assert same(there.cpu(), source)
    assert there.stride() == source.to("cpu", copy=True).stride()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_on_the_device_comes_back(layout: str) -> None:
    source = filled(torch.float32)
    back = LAYOUTS[layout](source.to("jax")).cpu()
    assert same(back, LAYOUTS[layout](source))


def test_nothing_is_shared() -> None:
    source = torch.arange(1024.0)
    there = source.to("jax")
    source.zero_()
    assert there[5].item() == 5
    back = there.cpu()
    back.zero_()
    assert there[5].item() == 5
    there.zero_()
    numpy = np.arange(1024.0)
    there = torch.as_tensor(numpy, device="jax")
    numpy[:] = 0
    assert there[5].item() == 5


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copy_across_devices_and_dtypes(non_blocking: bool) -> None:
    source = torch.randn(3, 4) * 10
    for here, there in (("cpu", "jax"), ("jax", "cpu"), ("jax", "jax")):
        target = torch.zeros(3, 4, dtype=torch.int32, device=there)
        target.copy_(source.to(here), non_blocking=non_blocking)
        assert torch.equal(target.cpu(), source.int())
        wide = torch.zeros(2, 3, 8, dtype=torch.float64, device=there)
        wide[:, :, ::2].copy_(source.to(here), non_blocking=non_blocking)
        assert torch.equal(wide.cpu()[1, :, ::2], source.double())
        assert not wide[:, :, 1::2].any()
    assert source.to("jax", torch.float64, non_blocking=non_blocking).dtype == torch.float64
    assert source.to("jax").to("cpu", torch.int64).dtype == torch.int64


def test_copy_that_does_not_fit_changes_nothing() -> None:
    target = torch.ones(3, device="jax")
    for source in (torch.zeros(2), torch.zeros(2, device="jax")):
        with pytest.raises(RuntimeError, match="must match the size"):
            target.copy_(source)
    assert target.tolist() == [1, 1, 1]


def test_memory_formats_keep_their_strides() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    there = image.to("jax")
    assert there.stride() == image.stride() == there.cpu().stride()
    assert there.to("cpu", memory_format=torch.contiguous_format).is_contiguous()
    assert image.to("jax", memory_format=torch.contiguous_format).is_contiguous()
    assert torch.equal(there.cpu(), image)


def test_python_numbers() -> None:
    def there(value: object) -> torch.Tensor:
        return torch.tensor(value, device="jax")

    assert there(2.5).item() == 2.5
    assert there([7]).item() == 7
    assert there(2**62 + 1).item() == 2**62 + 1
    assert bool(there(1))
    assert not bool(there(0.0))
    assert int(there(3)) == 3
    assert float(there(0.5)) == 0.5
    assert complex(there(1 + 2j)) == 1 + 2j
    assert [10, 20][there(1)] == 20
    assert there([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
    assert there([]).tolist() == []
    assert there(True).item() is True
    assert [float(row.sum()) for row in there([[1.0, 2.0], [3.0, 4.0]])] == [3.0, 7.0]
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(there([1, 2]))
    with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
        there([1, 2]).item()


def test_numpy() -> None:
    source = np.arange(6, dtype=np.int32).reshape(2, 3)
    there = torch.from_numpy(source).to("jax")
    assert there.dtype == torch.int32
    assert np.array_equal(there.cpu().numpy(), source)
    assert torch.as_tensor(source, device="jax").tolist() == source.tolist()
    for convert in (lambda t: t.numpy(), np.asarray):
        with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\) to copy the tensor to host memory first"):
            convert(there)


def test_dlpack_gives_a_copy() -> None:
    source = torch.arange(6.0).reshape(2, 3)
    there = source.to("jax")
    assert torch.equal(torch.from_dlpack(there).cpu(), source)
    assert np.array_equal(np.asarray(jax.dlpack.from_dlpack(there)), source.numpy())
    if torch.jax.get_device_properties().platform == "cpu":  # numpy takes nothing else
        assert np.array_equal(np.from_dlpack(there), source.numpy())
    taken = torch.from_dlpack(there.t())
    taken.zero_()
    assert torch.equal(there.cpu(), source)
    assert torch.from_dlpack(jax.numpy.ones(3)).tolist() == [1, 1, 1]
    with pytest.raises(BufferError, match="require gradient"):
        there.clone().requires_grad_().__dlpack__()
    with pytest.raises(BufferError, match="copy=False"):
        there.__dlpack__(copy=False)


def test_one_transfer_each_way() -> None:
    source = torch.randn(30, 40)
    metrics.clear()
    source.to("jax").cpu()
    found = metrics.counts()
    assert found["transfers to device"] == found["transfers to host"] == 1


def test_gradients_cross() -> None:
    source = torch.randn(3, requires_grad=True)
    (source.to("jax") * 2).cpu().sum().backward()
    assert source.grad is not None
    assert source.grad.device.type == "cpu"
    assert source.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: a + b,
        lambda a, b: b + a,
        lambda a, b: torch.mm(a, b),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: a.add_(b),
        lambda a, b: b.add_(a),
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: torch.add(b, b, out=a),
        lambda a, b: torch.add(a, a, out=b),
        lambda a, b: torch.nn.functional.linear(a, b),
        lambda a, b: torch.equal(a, b),
    ],
)
def test_mixed_devices_are_refused(call) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        call(torch.ones(3, 3, device="jax"), torch.ones(3, 3))


def test_a_cpu_scalar_may_join() -> None:
    assert (torch.ones(2, device="jax") * torch.tensor(3.0)).tolist() == [3, 3]


def test_data_loader_feeds_the_device() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))
    for options in ({}, {"pin_memory": True}, {"num_workers": 1, "multiprocessing_context": "spawn"}):
        batches = [x.to("jax", non_blocking=True) for x, _ in torch.utils.data.DataLoader(data, 4, **options)]
        assert torch.cat(batches).tolist() == list(range(10))


def test_a_dataset_on_the_device() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4.0).to("jax"))
    assert [batch.tolist() for (batch,) in torch.utils.data.DataLoader(data, 2)] == [[0, 1], [2, 3]]
    with pytest.raises(RuntimeError, match="cannot be shared with another process"):
        torch.ones(2, device="jax").share_memory_()


VIEWS = {
    "every other": ((10,), lambda t: t[1::2]),
    "every third": ((10,), lambda t: t[::3]),
    "columns": ((4, 6), lambda t: t[:, ::2]),
    "one column": ((4, 6), lambda t: t[1::2, 1]),
    "transposed rows": ((4, 6), lambda t: t.t()[::2]),
    "expanded": ((3,), lambda t: t.expand(2, 3)),
    "one, expanded": ((3,), lambda t: t[:1].expand(4)),
    "permuted": ((2, 3, 4), lambda t: t.permute(2, 0, 1)),
    "one, expanded to one": ((1,), lambda t: t.expand(1, 1)[0].as_strided((1,), (0,))),
    "long row": ((1, 6), lambda t: t[:, ::5]),
    "the end": ((4,), lambda t: t[3:]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_strided_sources_and_targets(name: str) -> None:
    shape, view = VIEWS[name]
    base = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    want = view(base)
    assert torch.equal(want.to("jax").cpu(), want)
    assert torch.equal(torch.zeros(want.shape, device="jax").copy_(want).cpu(), want)
    assert torch.equal(view(base.to("jax")).cpu(), want)
    if 0 not in want.stride():
        strided = torch.empty_strided(want.shape, want.stride(), device="jax").copy_(want)
        assert torch.equal(strided.cpu(), want)
        assert torch.equal((strided * 2).cpu(), want * 2)
        assert torch.equal(torch.zeros_like(strided).copy_(strided).cpu(), want)
        target = torch.zeros(shape)
        view(target).copy_(view(base.to("jax")))
        assert torch.equal(view(target), want)


@pytest.mark.parametrize(
    "make",
    [
        lambda x, device: torch.ones_like(x, device=device),
        lambda x, device: torch.full_like(x, 2, device=device),
        lambda x, device: torch.zeros_like(x, device=device),
        lambda x, device: torch.rand_like(x, device=device),
        lambda x, device: x.new_full((2,), 3, device=device),
        lambda x, device: x.new_ones(2, device=device),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta", "jax"])
def test_a_tensor_like_another_is_made_where_asked(make, device):
    x = torch.arange(6.0).reshape(2, 3).t()
    made, want = make(x.to("jax"), device), make(x, "cpu")
    assert made.device.type == device
    assert (made.shape, made.dtype, made.stride()) == (want.shape, want.dtype, want.stride())


def test_numbers_given_as_tensors_go_where_the_result_is_made():
    ends = torch.tensor([1.0, 4.0], device="jax")
    made = torch.linspace(ends[0], ends[1], 4, device="cpu")
    assert made.device.type == "cpu"
    assert made.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert torch.full_like(ends, 7.0, device="cpu").tolist() == [7.0, 7.0]
