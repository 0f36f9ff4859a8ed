"""accelerate's Accelerator: the device it takes, half precision, checkpoints, compilation, device maps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.support import GPT, need, ran

pytestmark = [need("accelerate", "transformers"), pytest.mark.slow]

TRAIN = (
    GPT
    + """
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision=sys.argv[1], cpu=sys.argv[2] == "cpu", dynamo_backend=sys.argv[3])
model = gpt()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = torch.utils.data.DataLoader(DATA, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
place = next(model.parameters()).device.type
print(json.dumps([accelerator.device.type, place, batch["input_ids"].device.type, losses]))
"""
)


@pytest.mark.parametrize(("precision", "backend"), [("bf16", "no"), ("no", "no"), ("no", "isthmus")])
def test_twenty_steps(precision: str, backend: str) -> None:
    *places, losses = ran(TRAIN, "on", precision, "", backend)
    assert places == ["jax", "jax", "jax"]
    *places, wanted = ran(TRAIN, "off", precision, "cpu", "no")
    assert places == ["cpu", "cpu", "cpu"]
    assert len(losses) == 20
    assert losses[-1] < 0.8 * losses[0]
    # bfloat16 has 8 bits; the two differ in where the CPU and XLA round within an op.
    assert losses == pytest.approx(wanted, rel=2**-8 if precision == "bf16" else 1e-4)


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_the_cpu_is_taken_unless_asked(setting: str) -> None:
    code = """
        import json, sys, accelerate, torch
        print(json.dumps([accelerate.Accelerator().device.type, "jax" in sys.modules]))
    """
    assert ran(code, setting) == ["cpu", False]


def test_the_setting_can_be_assigned_after_the_import() -> None:
    code = """
        import json, accelerate, isthmus
        isthmus.config.libraries = "on"
        print(json.dumps(accelerate.Accelerator().device.type))
    """
    assert ran(code, "auto") == "jax"


def test_a_cpu_that_is_asked_for_is_kept() -> None:
    code = "import json, accelerate; print(json.dumps(accelerate.Accelerator(cpu=True).device.type))"
    assert ran(code, "on") == "cpu"


def test_a_checkpoint_restores_the_random_state(tmp_path: Path) -> None:
    code = """
        import json, sys, torch, accelerate
        accelerator = accelerate.Accelerator()
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        accelerate.utils.set_seed(3)
        torch.rand(5, device="jax")
        accelerator.save_state(sys.argv[1])
        first = torch.rand(5, device="jax").tolist()
        other = torch.rand(5, device="jax").tolist()
        accelerator.load_state(sys.argv[1])
        print(json.dumps([first, torch.rand(5, device="jax").tolist(), other]))
    """
    first, again, other = ran(code, "on", str(tmp_path))
    assert first == again
    assert first != other


def test_device_map_auto(tmp_path: Path) -> None:
    code = (
        GPT
        + """
import accelerate
model = gpt().eval()
ids = DATA[0]["input_ids"][None]
wanted = model(input_ids=ids).logits
model.save_pretrained(sys.argv[1])
placed = transformers.GPT2LMHeadModel.from_pretrained(sys.argv[1], device_map="auto").eval()
out = placed(input_ids=ids.to(placed.device)).logits
file = sys.argv[1] + "/model.safetensors"
plain = accelerate.load_checkpoint_and_dispatch(gpt(), file, device_map="auto", strict=False)
print(json.dumps([
    sorted({p.device.type for p in placed.parameters()}), out.device.type, (out.cpu() - wanted).abs().max().item(),
    sorted({p.device.type for p in plain.parameters()}),
]))
"""
    )
    places, place, difference, dispatched = ran(code, "on", str(tmp_path))
    assert (places, place, dispatched) == (["jax"], "jax", ["jax"])
    assert difference < 1e-5
