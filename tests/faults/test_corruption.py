"""Files that were damaged or made to harm: a clear error or the right values, and no code of theirs is run."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import isthmus
from isthmus._export import container, loader
from isthmus._runtime import checksums, compiler, executable_cache
from isthmus.errors import DamagedFile, ExportError, IsthmusError

ROOT = Path(__file__).parent.parent.parent
X = torch.linspace(-1, 1, 16).reshape(2, 8)
TIMES = [20, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]


class Small(nn.Module):
    """A model with a condition on its input, and a dynamic size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(5, 8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.head(self.embed(ids) + x), -1)


IDS = torch.tensor([1, 4])


@pytest.fixture(scope="module")
def artifact() -> Any:
    made = isthmus.export(
        Small(), (IDS, X), dynamic_shapes={"ids": {0: "batch"}, "x": {0: "batch"}}, precompile=True
    )
    return made


@pytest.fixture(scope="module")
def right(artifact: Any) -> torch.Tensor:
    return artifact.module()(IDS, X)


@pytest.fixture
def folder(artifact: Any, tmp_path: Path) -> Path:
    artifact.save(tmp_path / "program")
    return tmp_path / "program"


@pytest.fixture
def archive(artifact: Any, tmp_path: Path) -> Path:
    artifact.save(tmp_path / "program.isthmus")
    return tmp_path / "program.isthmus"


def damaged(data: bytes, times: int, seed: int = 0) -> Iterator[bytes]:
    """Yield data with one bit flipped, or cut short, at random places."""
    rng = np.random.default_rng(seed)
    for n in range(times):
        if n % 5 == 4:
            yield data[: rng.integers(len(data))]
        else:
            bits = bytearray(data)
            bits[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
            yield bytes(bits)


def refuses(path: Path, right: torch.Tensor, **options: Any) -> bool:
    """Return whether a program is refused, by both loaders; what is not refused must compute what it did."""
    refused = False
    try:
        torch.testing.assert_close(isthmus.load(path, **options)(IDS, X), right, rtol=0, atol=0)
    except (DamagedFile, ExportError):
        refused = True
    # zipfile has many words for a file that is none. The small loader may take a folder whose damage it need not read,
    # such as the braces around a checksum.
    with contextlib.suppress(ValueError, KeyError, OSError, zipfile.BadZipFile, RuntimeError, EOFError):
        np.testing.assert_array_equal(loader.load(path)(IDS.numpy(), X.numpy()), right.numpy())
    return refused


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("part", ["program.json", "program.mlirbc", "weights.safetensors"])
def test_damaged_parts_of_a_folder(folder: Path, right: torch.Tensor, part: str, times: int) -> None:
    good = (folder / part).read_bytes()
    refused = 0
    for bad in damaged(good, times):
        (folder / part).write_bytes(bad)
        refused += refuses(folder, right)
    assert refused == times
    with pytest.raises(ValueError, match=f"{part} is damaged"):
        loader.load(folder)
    (folder / part).write_bytes(good)
    assert not refuses(folder, right)


@pytest.mark.parametrize("times", TIMES)
def test_damaged_archives(archive: Path, right: torch.Tensor, times: int) -> None:
    good = archive.read_bytes()
    refused = 0
    for bad in damaged(good, times):
        archive.write_bytes(bad)
        refused += refuses(archive, right, executables=True)
    # Dates and modes in an archive mean nothing, and the scripts in it are not read.
    assert times // 2 < refused


@pytest.mark.parametrize("times", TIMES)
def test_damaged_executables(folder: Path, right: torch.Tensor, times: int) -> None:
    (file,) = folder.glob("executable-*.bin")
    good = file.read_bytes()
    spec = importlib.util.spec_from_file_location("precompiled", folder / "precompiled.py")
    assert spec is not None
    assert spec.loader is not None
    precompiled = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(precompiled)
    bare = loader.load(folder)
    for bad in damaged(good, times):
        file.write_bytes(bad)
        with pytest.raises(DamagedFile, match=r"executable-\w+\.bin is not what was written"):
            isthmus.load(folder, executables=True)
        with pytest.raises(ValueError, match="is damaged"):
            precompiled.attach(bare, folder)
    assert not refuses(folder, right), "what is not asked for is not read"
    file.write_bytes(good)
    assert not refuses(folder, right, executables=True)


@pytest.mark.parametrize("times", TIMES)
def test_damaged_checkpoints(tmp_path: Path, times: int) -> None:
    state = {"a": torch.arange(7.0), "b": {"c": torch.ones(300), "n": 3, "s": "text"}}
    isthmus.checkpoint.save(tmp_path / "a", state)
    parts = sorted(path for path in (tmp_path / "a").rglob("*") if path.is_file() and path.stat().st_size)
    assert len(parts) > 5
    for n, part in enumerate(parts):
        good = part.read_bytes()
        for bad in damaged(good, -(-times // len(parts)), n):
            part.write_bytes(bad)
            with pytest.raises(DamagedFile) as raised:
                isthmus.checkpoint.load(tmp_path / "a")
            assert raised.value.file == str(tmp_path / "a")
            assert raised.value.part == part.relative_to(tmp_path / "a").as_posix()
        part.write_bytes(good)
    assert isthmus.checkpoint.load(tmp_path / "a")["b"]["n"] == 3


def build() -> None:
    """Compile a small program, run it, and check its result."""
    x = np.arange(6.0, dtype=np.float32)
    made = compiler.build(lambda x: (jnp.cumsum(x) * 3,), [x])
    np.testing.assert_array_equal(made.call(x)[0], np.cumsum(x) * 3)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the cache of executables; counts begin anew."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(isthmus.config, "current", replace(isthmus.config.current, cache=str(folder)))
    isthmus.metrics.clear()
    for cached in (executable_cache._tidied, executable_cache._warn_of, executable_cache._sizes):
        cached.cache_clear()
    return folder


def loaded_from_disk() -> int:
    return isthmus.metrics.counts().get("loaded from disk", 0)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("part", ["executable", "key"])
def test_damaged_executables_of_the_cache(cache: Path, part: str, times: int) -> None:
    build()
    names = {path.name: path for path in cache.iterdir()}
    file = names.pop("key")
    if part == "executable":
        (file,) = names.values()
    for n in range(times):
        # Of what is there now: with a key that was damaged so before, the executable would be right.
        file.write_bytes([*damaged(file.read_bytes(), 5, n)][n % 5])
        build()
    assert loaded_from_disk() == 0
    build()
    assert loaded_from_disk() == 1
    assert len(list(cache.iterdir())) == 2


class Harmful:
    """What leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_the_cache_unpickles_what_it_wrote_and_nothing_else(cache: Path, tmp_path: Path) -> None:
    harmful, mark = pickle.dumps(Harmful(tmp_path / "mark")), tmp_path / "mark"
    build()
    (file,) = (path for path in cache.iterdir() if path.name != "key")
    good = file.read_bytes()
    for content in (
        harmful,
        hashlib.sha256(harmful).digest() + harmful,
        good[: executable_cache._DIGEST] + harmful,
    ):
        file.write_bytes(content)
        build()
    other = file.with_name("0" * 64)
    file.rename(other)  # an executable of ours under the name of another program
    other.rename(other.with_name(file.name))
    build()
    assert loaded_from_disk() == 1
    content = (
        executable_cache._digest(other, good[executable_cache._DIGEST :]) + good[executable_cache._DIGEST :]
    )
    file.write_bytes(content)
    build()
    assert loaded_from_disk() == 1
    assert not mark.exists()
    file.write_bytes(executable_cache._digest(file, harmful) + harmful)
    build()
    assert mark.exists(), "with the key it is unpickled, so the test would see it"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="modes say nothing here")
def test_a_cache_that_others_can_write_to_is_not_used(cache: Path, tmp_path: Path) -> None:
    build()
    (file,) = (path for path in cache.iterdir() if path.name != "key")
    for mode in (0o770, 0o707, 0o720):
        cache.chmod(mode)
        executable_cache._warn_of.cache_clear()
        with pytest.warns(UserWarning, match="others may write to it"):
            build()
        assert loaded_from_disk() == 0
    cache.chmod(0o755)
    file.chmod(0o666)
    build()
    assert loaded_from_disk() == 0
    assert file.stat().st_mode & 0o777 == 0o600, "it was replaced"
    elsewhere = tmp_path / "elsewhere"
    shutil.copy(file, elsewhere)
    file.unlink()
    file.symlink_to(elsewhere)
    build()
    assert loaded_from_disk() == 0
    if os.geteuid() == 0:
        os.chown(cache, 12345, -1)
        executable_cache._warn_of.cache_clear()
        with pytest.warns(UserWarning, match="belongs to another user"):
            build()
        assert loaded_from_disk() == 0
        os.chown(cache, 0, -1)
    build()
    assert loaded_from_disk() == 1


def test_the_cache_stays_small_and_tidy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    (file,) = (path for path in cache.iterdir() if path.name != "key")
    (cache / "mine.txt").write_text("mine")
    (cache / ".isthmus-0123456789ab-0123456789abcdef.tmp").write_bytes(b"of a process that died")
    for n in range(20):
        old = cache / f"{n:064x}"
        old.write_bytes(bytes(100_000))
        os.utime(old, (n, n))
    monkeypatch.setattr(isthmus.config, "current", replace(isthmus.config.current, cache_size=1))
    executable_cache._sizes.cache_clear()
    executable_cache._tidied.cache_clear()
    file.unlink()
    build()
    left = {path.name for path in cache.iterdir()}
    assert {"mine.txt", "key", file.name} <= left
    assert not any(name.startswith(".isthmus-") for name in left)
    assert sum(path.stat().st_size for path in cache.iterdir()) < 2**20
    assert f"{19:064x}" in left
    assert f"{0:064x}" not in left, "the oldest go first"
    assert len(left) > 8


def test_executables_are_unpickled_only_when_asked_for(
    folder: Path, tmp_path: Path, right: torch.Tensor
) -> None:
    (file,) = folder.glob("executable-*.bin")
    file.write_bytes(pickle.dumps(Harmful(tmp_path / "mark")))
    change(
        folder,
        lambda spec: spec["parts"][file.name].__setitem__(1, hashlib.sha256(file.read_bytes()).hexdigest()),
    )
    assert not refuses(folder, right)
    assert not (tmp_path / "mark").exists()
    with pytest.raises(TypeError):
        isthmus.load(folder, executables=True)
    assert (tmp_path / "mark").exists(), "it was asked for, so the test would see it"


def change(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edit the signature of a program, with a right checksum after."""
    spec = json.loads((folder / "program.json").read_text())
    del spec["sha256"]
    edit(spec)
    (folder / "program.json").write_bytes(container._sealed(spec))


def store(folder: Path, part: str, content: bytes) -> None:
    """Replace a part of a program, with a right checksum."""
    (folder / part).write_bytes(content)
    change(folder, lambda spec: spec["parts"].update({part: [part, hashlib.sha256(content).hexdigest()]}))


def set_weight(**about: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda spec: spec["weights"]["head.bias"].update(about)


def set_file(name: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda spec: spec["parts"]["weights.safetensors"].__setitem__(0, name)


def set_range(low: int, high: int) -> Callable[[dict[str, Any]], Any]:
    def edit(spec: dict[str, Any]) -> None:
        about = spec["weights"]["head.bias"]
        about["bytes"] = [about["bytes"][0] + low, about["bytes"][1] + high]

    return edit


FORGED = {
    "a name that leads up": (set_file("../weights.safetensors"), "is no name of a file beside"),
    "an absolute name": (set_file("/etc/passwd"), "is no name of a file beside"),
    "a name that is a folder": (set_file(".."), "is no name of a file beside|is a link, or no file"),
    "a name that is empty": (set_file(""), "is no name of a file beside|is a link, or no file"),
    "a name that is a number": (set_file(3), "is no name of a file beside"),
    "no such part": (lambda spec: spec["parts"].pop("program.mlirbc"), r"KeyError: 'program\.mlirbc'"),
    "a negative place": (set_range(-(2**20), -(2**20)), "does not fit"),
    "overlapping places": (set_range(-4, -4), "does not fit"),
    "a place behind the end": (set_range(2**20, 2**20), "does not fit"),
    "a longer place": (set_range(0, 4), "does not fit"),
    "a place that is text": (set_weight(bytes="12"), "does not fit|TypeError"),
    "another shape": (set_weight(shape=[4]), "does not fit"),
    "a shape of the same size": (set_weight(shape=[1, 3]), "it says that the program is"),
    "a negative shape": (set_weight(shape=[-3]), r"has the shape \[-3\]"),
    "a shape of floats": (set_weight(shape=[3.0]), r"has the shape \[3.0\]"),
    "a shape beyond all memory": (set_weight(shape=[2**62, 2**62]), "does not fit"),
    "another dtype": (set_weight(dtype="int32"), "it says that the program is"),
    "a dtype of objects": (set_weight(dtype="object"), "does not fit"),
    "no dtype": (set_weight(dtype="nonsense"), "nonsense"),
    "another weight": (
        lambda spec: spec["weights"].update(more=spec["weights"]["head.bias"]),
        "and program.json",
    ),
    "another kind of input": (
        lambda spec: spec["inputs"]["ids"].update(dtype="float32"),
        "it says that the program",
    ),
    "an input of objects": (lambda spec: spec["inputs"]["ids"].update(dtype="object"), "object"),
    "a negative input": (lambda spec: spec["inputs"]["ids"].update(shape=[-1]), "dimension"),
    "another result": (
        lambda spec: spec["results"]["tuple"][0].update(dtype="int32"),
        "it says that the program is",
    ),
    "fewer conditions": (lambda spec: spec["conditions"].pop(), "has not 0 conditions"),
    "no kinds": (lambda spec: spec["kinds"].clear(), "kinds has"),
    "tied to nothing": (lambda spec: spec["tied"].update({"head.bias2": "none"}), "kinds has"),
    "no constraints": (lambda spec: spec["constraints"].append("nonsense"), "nonsense|Constraint"),
    "a version that is text": (lambda spec: spec.update(convention="9"), "TypeError"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_signatures(folder: Path, name: str) -> None:
    edit, words = FORGED[name]
    change(folder, edit)
    with pytest.raises(DamagedFile, match=f"(?s)is not what was written\n  because .*({words})") as raised:
        isthmus.load(folder)
    assert raised.value.file == str(folder)
    assert "to go on" in str(raised.value)


def test_links_are_refused(folder: Path, tmp_path: Path) -> None:
    for part in ("weights.safetensors", "program.mlirbc", "program.json"):
        (folder / part).rename(tmp_path / part)
        (folder / part).symlink_to(tmp_path / part)
        with pytest.raises(DamagedFile, match=f"{part} is a link"):
            isthmus.load(folder)
        (folder / part).unlink()
        os.mkfifo(folder / part)  # to open it would wait for ever
        with pytest.raises(DamagedFile, match=f"{part} is a link, or no file"):
            isthmus.load(folder)
        (folder / part).unlink()
        (tmp_path / part).rename(folder / part)
    isthmus.load(folder)


def test_names_that_are_there_twice(folder: Path, archive: Path) -> None:
    text = (folder / "program.json").read_bytes().partition(b"\n")[2]
    twice = text.replace(b' "fixed": {},', b' "fixed": {},\n "fixed": {},')
    assert twice != text
    (folder / "program.json").write_bytes(container._seal(twice) + twice)
    with pytest.raises(DamagedFile, match="'fixed' is there twice"):
        isthmus.load(folder)
    with zipfile.ZipFile(archive, "a") as file, pytest.warns(UserWarning, match="Duplicate name"):
        file.writestr("weights.safetensors", b"others")
    with pytest.raises(DamagedFile, match=r"weights\.safetensors is there 2 times"):
        isthmus.load(archive)


def test_nested_too_deeply(folder: Path) -> None:
    good = (folder / "program.json").read_bytes().partition(b"\n")[2]
    for text in (
        b' "format": ' + b"[" * 10**6,
        good.replace(b'"fixed": {}', b'"fixed": ' + b"[" * 10**5 + b"]" * 10**5),
    ):
        (folder / "program.json").write_bytes(container._seal(text) + text)
        with pytest.raises(DamagedFile, match="nested too deeply"):
            isthmus.load(folder)
    deep: Any = None
    for _ in range(400):
        deep = [deep]
    (folder / "program.json").write_bytes(container._seal(good) + good)
    change(folder, lambda spec: spec["inputs"].update(ids=deep))
    with pytest.raises(DamagedFile):
        isthmus.load(folder)


def test_forged_headers_of_safetensors(folder: Path) -> None:
    good = (folder / "weights.safetensors").read_bytes()
    size = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + size])
    moved = {
        **header,
        "head.bias": {**header["head.bias"], "data_offsets": header["head.weight"]["data_offsets"]},
    }

    def with_header(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text + good[8 + size :]

    for content, words in [
        ((2**63).to_bytes(8, "little") + good[8:], "its header takes"),
        (good[:4], "its header takes"),
        (with_header(b"[" * 10**6), "nested too deeply"),
        (with_header(b'{"a": {}, "a": {}}'), "'a' is there twice"),
        (with_header(b"{}"), "and program.json"),
        (with_header(json.dumps(moved).encode().ljust(size)), "is elsewhere in its header|does not fit"),
        (good + b"more", "bytes too many"),
    ]:
        store(folder, "weights.safetensors", content)
        with pytest.raises(DamagedFile, match=words) as raised:
            isthmus.load(folder)
        assert raised.value.part == "weights.safetensors"


def test_archives_that_claim_to_be_huge(archive: Path, tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.isthmus"
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as file:
        for name in source.namelist():
            file.writestr(name, source.read(name) if "weights" not in name else bytes(50_000_000))
    with pytest.raises(DamagedFile, match="the whole archive has fewer"):
        isthmus.load(bomb)


def test_forged_checkpoints(tmp_path: Path) -> None:
    isthmus.checkpoint.save(tmp_path / "a", {"x": torch.ones(3)})
    listed = (tmp_path / "a" / checksums.LIST).read_text().splitlines()[:-1]
    digest = hashlib.sha256(b"mine").hexdigest()
    (tmp_path / "mine").write_bytes(b"mine")

    def write(lines: list[str]) -> None:
        text = "".join(f"{line}\n" for line in lines).encode()
        seal = b"# %s\n" % hashlib.sha256(text).hexdigest().encode()
        (tmp_path / "a" / checksums.LIST).write_bytes(text + seal)

    for lines, words in [
        ([f"{digest}  ../mine"], "leads out of the checkpoint"),
        ([f"{digest}  {tmp_path}/mine"], "leads out of the checkpoint"),
        ([f"{digest}  "], "leads out of the checkpoint"),
        ([*listed, f"{digest}  none"], "it is not there"),
        ([*listed, listed[0]], "it has a name twice"),
        ([f"{digest}  d"], "it is a link, or not the file it was"),
    ]:
        write(lines)
        with pytest.raises(DamagedFile, match=words):
            isthmus.checkpoint.load(tmp_path / "a")
    write(listed)
    isthmus.checkpoint.load(tmp_path / "a")
    for part in ("_METADATA", "d", checksums.LIST):
        (tmp_path / "a" / part).rename(tmp_path / "away")
        (tmp_path / "a" / part).symlink_to(tmp_path / "away")
        with pytest.raises(DamagedFile, match="it is a link"):
            isthmus.checkpoint.load(tmp_path / "a")
        (tmp_path / "a" / part).unlink()
        (tmp_path / "away").rename(tmp_path / "a" / part)


def test_a_checkpoint_without_checksums_that_orbax_cannot_read(tmp_path: Path) -> None:
    isthmus.checkpoint.save(tmp_path / "a", {"x": torch.ones(3)})
    (tmp_path / "a" / checksums.LIST).unlink()
    assert isthmus.checkpoint.load(tmp_path / "a")["x"].tolist() == [1, 1, 1]
    (tmp_path / "a" / "_METADATA").write_text("[" * 10**6)
    with pytest.raises(IsthmusError, match="orbax cannot read it"):
        isthmus.checkpoint.load(tmp_path / "a")


def test_programs_do_not_tell_where_they_were_made(folder: Path, archive: Path) -> None:
    secrets = {
        os.getcwd(),
        str(ROOT),
        str(Path(torch.__file__).parent.parent),
        "site-packages",
        "tests/faults",
    }
    secrets |= {str(Path(isthmus.__file__).parent), Path(__file__).name}
    parts = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert any(name.startswith("executable-") for name in parts)
    for name, content in {**parts, "archive": archive.read_bytes()}.items():
        for secret in secrets:
            assert secret.encode() not in content, f"{name} has {secret}"
