"""Lightning's Trainer and Fabric with ``accelerator="jax"``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.support import GPT, need, ran

pytestmark = [need("lightning", "transformers"), pytest.mark.slow]

TRAIN = (
    GPT
    + """
import logging, warnings
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.gpt = gpt()
        self.losses = []
    def training_step(self, batch, index):
        loss = self.gpt(**batch).loss
        self.losses.append(loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

def loader():
    return torch.utils.data.DataLoader(DATA, batch_size=4)
"""
)
TRAINER = (
    TRAIN
    + """
trainer = lightning.Trainer(
    accelerator=sys.argv[1], precision=sys.argv[2], max_steps=20, logger=False, enable_progress_bar=False,
    default_root_dir=sys.argv[3], enable_model_summary=False,
)
model = Model()
trainer.fit(model, loader())
print()
print(json.dumps([trainer.strategy.root_device.type, len(os.listdir(sys.argv[3] + "/checkpoints")), model.losses]))
"""
)
FABRIC = (
    TRAIN
    + """
fabric = lightning.Fabric(accelerator=sys.argv[1], precision=sys.argv[2])
fabric.launch()
model = gpt()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = fabric.setup(model, optimizer)
losses = []
for batch in fabric.setup_dataloaders(loader()):
    optimizer.zero_grad()
    loss = model(**batch).loss
    fabric.backward(loss)
    optimizer.step()
    losses.append(loss.item())
print()
print(json.dumps([fabric.device.type, batch["input_ids"].device.type, losses]))
"""
)
# How far rounding of the precision may move a loss; float16 has 11 bits, bfloat16 8.
PRECISIONS = {"32-true": 1e-4, "bf16-mixed": 2**-8, "bf16-true": 2**-6}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("program", [TRAINER, FABRIC], ids=["trainer", "fabric"])
def test_twenty_steps(program: str, precision: str, tmp_path: Path) -> None:
    place, there, losses = ran(program, "on", "jax", precision, str(tmp_path / "jax"))
    assert place == "jax"
    assert there in ("jax", 1)
    place, _, wanted = ran(program, "off", "cpu", precision, str(tmp_path / "cpu"))
    assert place == "cpu"
    assert len(losses) == 20
    assert losses[-1] < 0.8 * losses[0]
    assert losses == pytest.approx(wanted, rel=PRECISIONS[precision])


def test_half_precision_with_a_scaler_trains(tmp_path: Path) -> None:
    place, _, losses = ran(TRAINER, "on", "jax", "16-mixed", str(tmp_path))
    assert place == "jax"
    assert losses[-1] < 0.8 * losses[0]  # the CPU has no 16-mixed to compare with


def test_auto_takes_the_device_only_where_it_is_offered() -> None:
    code = """
        import json, tests.integrations.torchvision_names, lightning
        print(json.dumps(lightning.Fabric(accelerator='auto').device.type))
    """
    assert ran(code, "on") == "jax"
    assert ran(code, "auto") == "cpu"


def test_several_devices_are_refused_in_words() -> None:
    code = """
        import json, tests.integrations.torchvision_names, lightning
        try:
            lightning.Fabric(accelerator="jax", devices=2)
        except ValueError as error:
            print(json.dumps(str(error)))
    """
    assert "takes one device" in ran(code, "auto")
