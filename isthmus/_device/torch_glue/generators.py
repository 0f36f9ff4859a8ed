"""``torch.Generator(device="jax")``: a CPU generator that reports the device.

torch makes a generator of an outside device in C++, by a hook that Python cannot provide. Random ops of the device take
their numbers from any CPU generator they are passed (``core/generator.py``), so one that says ``device='jax:0'`` is
all that callers need which compare a generator's device with a tensor's (diffusers, timm, torchsde). Its state is the
CPU generator's: seeds, ``get_state`` and ``set_state`` are torch's own.

``torch._C.Generator`` is a static type, whose constructor cannot be replaced, so the name ``torch.Generator`` is: by a
class that makes torch's generators for every other device, and counts these as its instances. Code that looks at
``torch._C.Generator``, as Dynamo does, sees what it always saw.
"""

from __future__ import annotations

from typing import Any

import torch

from isthmus._device.torch_glue import patches, private


class _GeneratorType(type(private.Generator)):  # type: ignore[misc]  # which is no plain ``type`` since torch 2.13
    """Makes generators: torch's own, but for the device "jax"."""

    def __call__(cls, device: Any = "cpu") -> Any:
        where = torch.device(device)
        if where.type != "jax":
            return private.Generator(device)
        from isthmus._device.torch_glue.torch_jax import check_device

        check_device(where)
        return super().__call__()

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, private.Generator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, private.Generator)


class Generator(private.Generator, metaclass=_GeneratorType):
    """A generator of random numbers for the device "jax"; see torch.Generator."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # read-only in torch too, whatever its stub says
        """The device whose ops it is for."""
        return torch.device("jax", 0)

    def clone_state(self) -> Generator:
        """Return another generator that is in the same state."""
        clone = Generator("jax")
        clone.set_state(self.get_state())
        return clone

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.initial_seed(), self.get_state())

    def __deepcopy__(self, memo: dict[int, Any]) -> Generator:
        return self.clone_state()


def _restored(seed: int, state: torch.Tensor) -> Generator:
    """Return a generator as it was pickled."""
    generator = Generator("jax")
    generator.manual_seed(seed)
    generator.set_state(state)
    return generator


def install() -> None:
    """Let ``torch.Generator`` know the device; called by ``import torch``."""
    patches.replace("torch", "Generator", lambda theirs: Generator)
    private.trace_as_objects(Generator)
