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

from isthmus._device.core import generator
from isthmus._device.torch_glue import patches, private


class _GeneratorType(type(private.Generator)):  # type: ignore[misc]  # which is no plain ``type`` since torch 2.13
    """Makes generators: torch's own, but for the device "jax"."""

    def __call__(cls, device: Any = "cpu") -> Any:
        where = torch.device(device)
        # Any other device is torch's.
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


class _DefaultGenerator(Generator):
    """What ops of the device without a generator draw from, as an object: ``torch.jax.default_generators[0]``.

    The state is that of ``torch.jax.get_rng_state``. A CPU tensor that is filled from it takes numbers of the same
    seed.
    """

    def manual_seed(self, seed: int) -> _DefaultGenerator:
        """Start the sequence of this seed anew."""
        super().manual_seed(seed)
        generator.manual_seed(seed)
        return self

    def seed(self) -> int:
        """Take a seed from the operating system and return it."""
        chosen = super().seed()
        generator.manual_seed(chosen)
        return chosen

    def initial_seed(self) -> int:
        """Return the seed that was last set."""
        return generator.default.seed

    def get_state(self) -> torch.Tensor:
        """Return the state as a CPU byte tensor."""
        return generator.get_state()

    def set_state(self, state: torch.Tensor) -> _DefaultGenerator:
        """Go back to a state that ``get_state`` returned."""
        generator.set_state(state)
        return self

    def get_offset(self) -> int:
        """Return how many random ops have drawn since the seed was set."""
        return generator.state()[1]

    def clone_state(self) -> Generator:
        """Raise: other generators are torch's for the CPU, which draw other numbers."""
        raise NotImplementedError(
            "the default generator of device 'jax' has no copies; get_state() and set_state() keep its state"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        self.clone_state()
        raise AssertionError


def _restored(seed: int, state: torch.Tensor) -> Generator:
    """Return a generator as it was pickled."""
    generator = Generator("jax")
    generator.manual_seed(seed)
    generator.set_state(state)
    return generator


def install() -> None:
    """Let ``torch.Generator`` know the device; called by ``import torch``."""
    from isthmus._device.torch_glue import torch_jax

    # At ``import torch``: scripts make generators before they make a tensor.
    patches.replace("torch", "Generator", lambda theirs: Generator)
    private.trace_as_objects(Generator)
    default = _DefaultGenerator("jax")
    place = private.generator_address(default)
    generator.stands_in = lambda given: private.generator_address(given) == place
    torch_jax.default_generators = (default,)
