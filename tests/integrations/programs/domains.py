"""Tables, time series, molecules, signals, reinforcement learning, and models that libraries bring in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.integrations.programs import program, seeded, trained
from tests.integrations.programs.science import network


@program("fastai", "Learner: one cycle of Adam with a metric, predictions")
def fastai_learner(device: str) -> Any:
    return _learner(device, {"device": torch.device(device)})


@program("fastai", "Learner, the device found by the library", settings="ISTHMUS_LIBRARIES=on")
def fastai_found(device: str) -> Any:
    from fastai.torch_core import defaults

    defaults.use_cuda = False if device == "cpu" else None
    return _learner(device, {})


def _learner(device: str, where: dict[str, Any]) -> Any:
    import fastai.callback.all  # noqa: F401  # adds the methods no_bar and fit_one_cycle
    from fastai.basics import Learner, accuracy
    from fastai.data.core import Datasets

    inputs = seeded(24, 4)
    rows = Datasets(range(24), [[lambda n: inputs[n]], [lambda n: n % 2]], splits=[range(18), range(18, 24)])
    loaders = rows.dataloaders(bs=6, shuffle=False, drop_last=False, num_workers=0, **where)
    model = network(4, 8, 2)
    learner = Learner(loaders, model, loss_func=nn.CrossEntropyLoss(), metrics=accuracy)
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(2, 1e-2)
        predicted, _ = learner.get_preds()
    return list(model.parameters()), predicted, learner.recorder.values[-1][0]


@program("pytorch-tabnet", "TabNetClassifier: fit and predict_proba", 1e-3)
def tabnet_classifier(device: str) -> Any:
    import numpy as np
    from pytorch_tabnet.tab_model import TabNetClassifier

    inputs, labels = seeded(40, 6).numpy(), np.arange(40) % 2
    model = TabNetClassifier(n_d=4, n_a=4, n_steps=2, seed=0, verbose=0, device_name=device)
    model.fit(inputs, labels, max_epochs=2, batch_size=20, virtual_batch_size=10, drop_last=False)
    return list(model.network.parameters()), torch.from_numpy(model.predict_proba(inputs))


@program("pytorch-forecasting", "a temporal fusion transformer: three steps on a batch of its data set", 1e-3)
def forecasting_transformer(device: str) -> Any:
    import logging

    import pandas
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.metrics import QuantileLoss

    logging.disable(logging.WARNING)
    values = seeded(60).double().numpy()
    frame = pandas.DataFrame(
        {"time": [*range(30)] * 2, "series": ["a"] * 30 + ["b"] * 30, "value": values, "known": values[::-1]}
    )
    data = TimeSeriesDataSet(
        frame, time_idx="time", target="value", group_ids=["series"], max_encoder_length=8, max_prediction_length=3,
        time_varying_known_reals=["known"], time_varying_unknown_reals=["value"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = TemporalFusionTransformer.from_dataset(
        data, hidden_size=8, attention_head_size=2, dropout=0.0, loss=QuantileLoss(), hidden_continuous_size=4
    ).to(device)
    torch.manual_seed(0)
    x, y = next(iter(data.to_dataloader(train=True, batch_size=6)))
    x = {name: part.to(device) if isinstance(part, torch.Tensor) else part for name, part in x.items()}
    wanted = (y[0].to(device), None)
    return trained(model, lambda: model.loss(model(x)["prediction"], wanted)), model(x)["prediction"]


@program("gluonts", "DeepAR: three steps of its likelihood")
def gluonts_deepar(device: str) -> Any:
    import logging

    from gluonts.torch.model.deepar.module import DeepARModel

    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    model = DeepARModel(
        freq="D", context_length=6, prediction_length=3, num_feat_dynamic_real=1, num_feat_static_real=1,
        num_feat_static_cat=1, cardinality=[2], hidden_size=8, num_layers=1, dropout_rate=0.0, lags_seq=[1, 2],
    ).to(device)  # fmt: skip
    past = model._past_length
    numbers = {
        "feat_static_cat": torch.tensor([[0], [1]], device=device),
        "feat_static_real": seeded(2, 1).to(device),
        "past_time_feat": seeded(2, past, 1).to(device),
        "past_target": seeded(2, past).abs().to(device),
        "past_observed_values": torch.ones(2, past, device=device),
        "future_time_feat": seeded(2, 3, 1).to(device),
    }
    future = seeded(2, 3).abs().to(device)
    seen = torch.ones(2, 3, device=device)
    return trained(
        model, lambda: model.loss(**numbers, future_target=future, future_observed_values=seen).mean()
    )


@program("mambapy", "Mamba with its parallel scan: three steps")
def mambapy_scan(device: str) -> Any:
    from mambapy.mamba import Mamba, MambaConfig

    torch.manual_seed(0)
    model = Mamba(MambaConfig(d_model=16, n_layers=2, d_state=4)).to(device)
    inputs = seeded(2, 12, 16).to(device)
    return trained(model, lambda: model(inputs).square().mean()), model(inputs)


@program("denoising-diffusion-pytorch", "the loss of given noise and a U-Net's gradients", 1e-3)
def denoising_diffusion(device: str) -> Any:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    torch.manual_seed(0)
    unet = Unet(dim=8, dim_mults=(1, 2), flash_attn=False)
    model = GaussianDiffusion(unet, image_size=8, timesteps=20).to(device)
    images, times = seeded(2, 3, 8, 8).abs().clamp(0, 1).to(device), torch.tensor([3, 11], device=device)
    noise = seeded(2, 3, 8, 8).to(device)
    return trained(model, lambda: model.p_losses(images, times, noise=noise)), model.q_sample(
        images, times, noise
    )


@program("spandrel", "ESRGAN, SwinIR and NAFNet found from their weights, and run")
def spandrel_models(device: str) -> Any:
    from spandrel import ModelLoader
    from spandrel.architectures.ESRGAN import ESRGAN
    from spandrel.architectures.NAFNet import NAFNet
    from spandrel.architectures.SwinIR import SwinIR

    results = []
    for make in (
        lambda: ESRGAN(num_filters=8, num_blocks=1, scale=2),
        lambda: SwinIR(
            img_size=8,
            embed_dim=12,
            depths=[2],
            num_heads=[2],
            window_size=4,
            upscale=2,
            upsampler="pixelshuffle",
        ),
        lambda: NAFNet(width=8, enc_blk_nums=[1], dec_blk_nums=[1]),
    ):
        torch.manual_seed(0)
        weights = make().state_dict()
        model = ModelLoader(device=device).load_from_state_dict(weights).to(device).eval()
        results.append(model(seeded(1, 3, 16, 16).abs().clamp(0, 1).to(device)))
    return results


@program("chemprop", "message passing over molecules: three steps")
def chemprop_network(device: str) -> Any:
    from chemprop import data, models
    from chemprop import nn as layers

    torch.manual_seed(0)
    points = [
        data.MoleculeDatapoint.from_smi(smiles, [float(number)])
        for number, smiles in enumerate(["CCO", "c1ccccc1", "CC(=O)O", "CN"])
    ]
    batch = data.collate_batch([data.MoleculeDataset(points)[number] for number in range(4)])
    model = models.MPNN(
        layers.BondMessagePassing(d_h=16, depth=2),
        layers.MeanAggregation(),
        layers.RegressionFFN(input_dim=16),
    ).to(device)
    batch.bmg.to(device)
    targets = batch.Y.to(device)
    loss = lambda: (model(batch.bmg) - targets).square().mean()  # noqa: E731
    return trained(model, loss), model(batch.bmg)


@program("torchkbnufft", "a non-uniform Fourier transform, its adjoint and gradients", 1e-3)
def kbnufft(device: str) -> Any:
    import torchkbnufft

    image = torch.complex(seeded(1, 1, 8, 8), seeded(1, 1, 8, 9)[..., :8]).to(device).requires_grad_()
    where = (seeded(2, 20).clamp(-3, 3)).to(device)
    forward = torchkbnufft.KbNufft(im_size=(8, 8)).to(device)
    adjoint = torchkbnufft.KbNufftAdjoint(im_size=(8, 8)).to(device)
    samples = forward(image, where)
    samples.abs().square().sum().backward()
    return samples, adjoint(samples.detach(), where), image.grad


@program("tianshou", "DQN: learning from a batch of its replay buffer")
def tianshou_dqn(device: str) -> Any:
    import numpy as np
    from tianshou.data import Batch, ReplayBuffer
    from tianshou.policy import DQNPolicy
    from tianshou.utils.net.common import Net

    torch.manual_seed(0)
    net = Net((3,), (2,), hidden_sizes=[8], device=device).to(device)
    np.random.seed(0)  # once the device is there: numpy's numbers say what is drawn from the buffer
    policy = DQNPolicy(net, torch.optim.SGD(net.parameters(), 0.1), 0.9, 2, target_update_freq=2)
    buffer = ReplayBuffer(size=16)
    states = seeded(17, 3).numpy()
    for number in range(16):
        buffer.add(
            Batch(
                obs=states[number], obs_next=states[number + 1], act=number % 2, rew=float(number % 3),
                terminated=number % 5 == 4, truncated=False, info={},
            )
        )  # fmt: skip
    losses = [policy.update(8, buffer)["loss"] for _ in range(3)]
    return losses, list(net.parameters())


@program("neuralforecast", "N-HiTS and TiDE: losses and gradients of windows", 1e-3)
def neuralforecast_models(device: str) -> Any:
    from neuralforecast.models import NHITS, TiDE

    results = []
    windows = {
        "insample_y": seeded(4, 12, 1).to(device), "insample_mask": torch.ones(4, 12, 1, device=device),
        "futr_exog": None, "hist_exog": None, "stat_exog": None,
    }  # fmt: skip
    for kind, more in ((NHITS, {"mlp_units": [[16, 16]] * 3}), (TiDE, {"hidden_size": 16})):
        torch.manual_seed(0)
        model = kind(h=4, input_size=12, **more).to(device).eval()
        results += trained(model, lambda m=model: m(windows).square().mean())
    return results
