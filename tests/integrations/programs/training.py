"""Training loops, optimizers, metrics, explanations, reinforcement learning, files."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.integrations.programs import program, seeded, trained
from tests.integrations.programs.science import network


@program("einops", "rearrange, reduce, einsum, its layers, with gradients")
def einops_functions(device: str) -> Any:
    import einops
    from einops.layers.torch import EinMix, Rearrange

    torch.manual_seed(0)
    x = seeded(2, 3, 4, 6).to(device).requires_grad_()
    patches = einops.rearrange(x, "b c (h p) (w q) -> b (h w) (p q c)", p=2, q=3)
    mixed = EinMix("b t c -> b t d", weight_shape="c d", bias_shape="d", c=18, d=5).to(device)(patches)
    pooled = einops.reduce(x, "b c h w -> b c", "max")
    joined = einops.einsum(patches, patches, "b i c, b j c -> b i j")
    (mixed.sum() + pooled.sum() + joined.sum()).backward()
    return patches, mixed, pooled, joined, x.grad, Rearrange("b t d -> t (b d)")(mixed)


@program("torchmetrics", "accuracy, AUROC, F1, confusion, Pearson, SSIM, retrieval, text")
def torchmetrics_many(device: str) -> Any:
    import torchmetrics as tm

    scores = seeded(40, 3).softmax(-1).to(device)
    labels = (torch.arange(40) % 3).to(device)
    many = tm.MetricCollection(
        [
            tm.Accuracy("multiclass", num_classes=3),
            tm.AUROC("multiclass", num_classes=3),
            tm.F1Score("multiclass", num_classes=3, average="macro"),
            tm.ConfusionMatrix("multiclass", num_classes=3),
            tm.CalibrationError("multiclass", num_classes=3),
        ]
    ).to(device)
    for start in (0, 20):
        many.update(scores[start : start + 20], labels[start : start + 20])
    a, b = seeded(30).to(device), seeded(31)[:30].to(device)
    images = seeded(2, 3, 24, 24).abs().to(device)
    return (
        many.compute(),
        tm.PearsonCorrCoef().to(device)(a, b),
        tm.SpearmanCorrCoef().to(device)(a, b),
        tm.image.StructuralSimilarityIndexMeasure(data_range=1.0).to(device)(images, images * 0.9),
        tm.retrieval.RetrievalMAP().to(device)(a, b > 0, indexes=labels[:30]),
        tm.text.Perplexity().to(device)(
            seeded(2, 5, 7).to(device), torch.arange(10).reshape(2, 5).to(device) % 7
        ),
    )


@program("lightning", "Trainer(accelerator=...) with validation and a checkpoint; Fabric")
def lightning_trainer(device: str) -> Any:
    import logging
    import tempfile

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(4, 8, 1)
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.net(batch).square().mean()
            self.log("loss", loss)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.losses.append(self.net(batch).mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    loader = torch.utils.data.DataLoader(list(seeded(12, 4)), batch_size=3)
    model = Model()
    lightning.Trainer(
        accelerator=device, max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(), num_sanity_val_steps=0,
    ).fit(model, loader, loader)  # fmt: skip
    fabric = lightning.Fabric(accelerator=device)
    net = fabric.setup(network(4, 8, 1))
    return model.losses, [net(batch) for batch in fabric.setup_dataloaders(loader)]


@program("pytorch-ignite", "a supervised trainer and evaluator with metrics")
def ignite_engine(device: str) -> Any:
    from ignite.engine import create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Accuracy, Loss

    model = network(4, 8, 2, device=device)
    data = [(seeded(6, 4), torch.arange(6) % 2), (seeded(6, 4) + 1, torch.arange(6) % 2)]
    loss = nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(
        model, torch.optim.Adam(model.parameters(), 1e-2), loss, device=device
    )
    trainer.run(data, max_epochs=2)
    judge = create_supervised_evaluator(model, {"accuracy": Accuracy(), "loss": Loss(loss)}, device=device)
    state = judge.run(data)
    return model[0].weight, state.metrics["accuracy"], state.metrics["loss"]


@program("skorch", "NeuralNetClassifier with scikit-learn's fit and predict_proba")
def skorch_classifier(device: str) -> Any:
    import numpy as np
    from skorch import NeuralNetClassifier

    net = NeuralNetClassifier(
        lambda: network(4, 8, 2), max_epochs=3, lr=0.1, device=device, train_split=None, verbose=0,
        iterator_train__shuffle=False, criterion=nn.CrossEntropyLoss,
    )  # fmt: skip
    inputs, labels = seeded(20, 4).numpy(), np.arange(20) % 2
    net.fit(inputs, labels)
    return net.module_[0].weight, torch.from_numpy(net.predict_proba(inputs))


@program("optuna", "a study whose trials train on the device")
def optuna_study(device: str) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    inputs = seeded(8, 4).to(device)
    last = []

    def trial_loss(trial: Any) -> float:
        model = network(4, 8, 1, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))
        last.append(trained(model, lambda: model(inputs).square().mean(), optimizer=optimizer)[-1])
        return last[-1].item()

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(trial_loss, n_trials=3)
    return last, study.best_value


@program("captum", "integrated gradients, saliency, occlusion, GradCAM")
def captum_attributions(device: str) -> Any:
    from captum.attr import IntegratedGradients, LayerGradCam, Occlusion, Saliency

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).to(device)
    image = seeded(2, 1, 8, 8).to(device)
    return (
        IntegratedGradients(model).attribute(image, target=1, n_steps=8),
        Saliency(model).attribute(image, target=0),
        Occlusion(model).attribute(image, target=2, sliding_window_shapes=(1, 4, 4), strides=(1, 4, 4)),
        LayerGradCam(model, model[0]).attribute(image, target=1),
    )


@program("opacus", "gradients of each sample, clipped, without noise")
def opacus_privacy(device: str) -> Any:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(network(4, 8, 2, device=device))
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        expected_batch_size=6,
    )
    losses = trained(model, lambda: model(seeded(6, 4).to(device)).square().mean(), optimizer=optimizer)
    return losses, [p.grad_sample for p in model.parameters() if p.grad_sample is not None]


@program("torchinfo", "a summary of a model on the device")
def torchinfo_summary(device: str) -> Any:
    import torchinfo

    model = network(4, 8, 2, device=device)
    said = torchinfo.summary(model, input_size=(3, 4), device=device, verbose=0)
    return said.total_params, said.total_mult_adds, model[0].weight


@program("fvcore", "FLOPs by tracing")
def fvcore_flops(device: str) -> Any:
    from fvcore.nn import FlopCountAnalysis

    model = network(4, 8, 2, device=device)
    return FlopCountAnalysis(model, seeded(3, 4).to(device)).total(), model[0].weight


@program("safetensors", "save_file, load_file with the device, load_model, safe_open")
def safetensors_files(device: str) -> Any:
    import tempfile

    import safetensors.torch as st
    from safetensors import safe_open

    model = network(4, 8, 2, device=device)
    file = f"{tempfile.mkdtemp()}/model.safetensors"
    st.save_file({**model.state_dict(), "half": seeded(3).bfloat16().to(device)}, file)
    loaded = st.load_file(file, device=device)
    with safe_open(file, "pt", device=device) as opened:
        part = opened.get_slice("0.weight")[2:4]
        whole = opened.get_tensor("0.weight")
    st.save_model(model, file)
    other = network(4, 8, 2, device=device)
    st.load_model(other, file, device=device)
    return loaded, part, whole, other.state_dict()


def _optimized(device: str, make: Any, dtype: torch.dtype = torch.float32) -> Any:
    model = network(6, 16, 16, 3, device=device).to(dtype)
    inputs = seeded(8, 6).to(device, dtype)
    return trained(model, lambda: model(inputs).square().mean(), steps=5, optimizer=make(model.parameters()))


@program("schedulefree", "AdamWScheduleFree")
def schedulefree_adamw(device: str) -> Any:
    import schedulefree

    model = network(6, 16, 3, device=device)
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2)
    optimizer.train()
    inputs = seeded(8, 6).to(device)
    losses = trained(model, lambda: model(inputs).square().mean(), steps=5, optimizer=optimizer)
    optimizer.eval()
    return losses, model(inputs)


@program("lion-pytorch", "Lion")
def lion(device: str) -> Any:
    from lion_pytorch import Lion

    return _optimized(device, lambda p: Lion(p, lr=1e-3))


@program("prodigyopt", "Prodigy")
def prodigy(device: str) -> Any:
    from prodigyopt import Prodigy

    return _optimized(device, lambda p: Prodigy(p))


@program("came-pytorch", "CAME")
def came(device: str) -> Any:
    from came_pytorch import CAME

    return _optimized(device, lambda p: CAME(p, lr=1e-3))


@program("heavyball", "AdamW and Muon")
def heavyball_optimizers(device: str) -> Any:
    import heavyball

    return [
        _optimized(device, lambda p, kind=kind: kind(p, lr=1e-3))
        for kind in (heavyball.AdamW, heavyball.Muon)
    ]


@program("torch-optimizer", "RAdam, Yogi, Shampoo")
def torch_optimizer(device: str) -> Any:
    import torch_optimizer

    return [
        _optimized(device, lambda p: torch_optimizer.RAdam(p)),
        _optimized(device, lambda p: torch_optimizer.Yogi(p)),
        # Roots of nearly singular matrices: in float32 either device is 3e-4 away from what float64 gives.
        _optimized(device, lambda p: torch_optimizer.Shampoo(p), torch.float64),
    ]


@program("torchopt", "a differentiable inner loop (MetaSGD)")
def torchopt_meta(device: str) -> Any:
    import torchopt

    model = network(4, 8, 1, device=device)
    inner = torchopt.MetaSGD(model, lr=0.1)
    before = list(model.parameters())
    inner.step(model(seeded(5, 4).to(device)).square().mean())
    loss = model(seeded(6, 4).to(device)).square().mean()
    return loss, torch.autograd.grad(loss, before)


@program("higher", "gradients through an inner loop")
def higher_inner_loop(device: str) -> Any:
    import higher

    model = network(4, 8, 1, device=device)
    with higher.innerloop_ctx(model, torch.optim.SGD(model.parameters(), lr=0.1)) as (inner, optimizer):
        optimizer.step(inner(seeded(5, 4).to(device)).square().mean())
        loss = inner(seeded(6, 4).to(device)).square().mean()
        loss.backward()
    return loss, [p.grad for p in model.parameters()]


@program("ema-pytorch", "a moving average of a model")
def ema(device: str) -> Any:
    from ema_pytorch import EMA

    model = network(4, 8, 1, device=device)
    average = EMA(model, beta=0.9, update_after_step=0, update_every=1)
    for _ in range(3):
        with torch.no_grad():
            model[0].weight += 0.5
        average.update()
    return average.ema_model[0].weight


@program("torch-ema", "a moving average of parameters")
def torch_ema(device: str) -> Any:
    from torch_ema import ExponentialMovingAverage

    model = network(4, 8, 1, device=device)
    average = ExponentialMovingAverage(model.parameters(), decay=0.9)
    with torch.no_grad():
        model[0].weight += 1
    average.update()
    with average.average_parameters():
        return model[0].weight.clone()


@program("torch-pruning", "channels of a convolution pruned with what depends on them")
def torch_pruning(device: str) -> Any:
    import torch_pruning as tp

    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(device).eval()
    )
    image = seeded(1, 3, 8, 8).to(device)
    pruner = tp.pruner.MagnitudePruner(
        model,
        image,
        importance=tp.importance.MagnitudeImportance(),
        pruning_ratio=0.5,
        ignored_layers=[model[3]],
    )
    pruner.step()
    return model(image), model[0].weight


@program("pytorch-metric-learning", "triplet and contrastive losses with a miner, ArcFace")
def metric_learning(device: str) -> Any:
    from pytorch_metric_learning import losses, miners

    torch.manual_seed(0)
    vectors = seeded(12, 8).to(device).requires_grad_()
    labels = (torch.arange(12) % 3).to(device)
    pairs = miners.MultiSimilarityMiner()(vectors, labels)
    arc = losses.ArcFaceLoss(3, 8).to(device)
    loss = (
        losses.TripletMarginLoss()(vectors, labels)
        + losses.ContrastiveLoss()(vectors, labels, pairs)
        + arc(vectors, labels)
    )
    loss.backward()
    return loss, vectors.grad


@program("tensordict", "nested dictionaries of tensors moved, stacked, indexed, in a module")
def tensordict_modules(device: str) -> Any:
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule

    data = TensorDict({"x": seeded(4, 3), "more": {"y": seeded(4, 2)}}, batch_size=[4]).to(device)
    module = TensorDictModule(network(3, 5, device=device), in_keys=["x"], out_keys=["z"])
    out = module(data)
    return torch.stack([out, out], 0)[:, 1:].to_dict()


@program("torchrl", "GAE, a PPO loss and its gradients")
def torchrl_ppo(device: str) -> Any:
    from tensordict import TensorDict
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    done = torch.zeros(2, 5, 1, dtype=torch.bool, device=device)
    done[:, -1] = True
    values, rewards = seeded(2, 5, 1).to(device), seeded(2, 5, 1).abs().to(device)
    data = TensorDict({"r": rewards}, batch_size=[2, 5])
    return generalized_advantage_estimate(0.99, 0.95, values, values.roll(1, 1), data["r"], done, done)


@program("stable-baselines3", "PPO on a small environment, the device given")
def baselines_ppo(device: str) -> Any:
    return _ppo(device)


@program("stable-baselines3", "PPO, the device found by the library", settings="ISTHMUS_LIBRARIES=on")
def baselines_found(device: str) -> Any:
    return _ppo("auto" if device == "jax" else device)


def _ppo(device: str) -> Any:
    import gymnasium
    import numpy as np
    from stable_baselines3 import A2C

    class Line(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (3,))
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, seed: Any = None, options: Any = None) -> Any:
            self.step_count = 0
            return np.zeros(3, np.float32), {}

        def step(self, action: Any) -> Any:
            self.step_count += 1
            seen = np.full(3, self.step_count / 8, np.float32)
            return seen, 1.0, self.step_count >= 8, False, {}

    # Actions are drawn by the device, whose numbers differ, so the policy is compared before it learns.
    model = A2C("MlpPolicy", Line(), device=device, seed=0, n_steps=4)
    seen = torch.linspace(-1, 1, 12).reshape(4, 3).to(model.device)
    values, log_probs, entropy = model.policy.evaluate_actions(
        seen, torch.tensor([0, 1, 1, 0]).to(model.device)
    )
    model.learn(16)
    assert all(p.isfinite().all() for p in model.policy.parameters())
    return values, log_probs, entropy


@program("torchjd", "UPGrad: gradients of two losses that do not conflict")
def torchjd_upgrad(device: str) -> Any:
    from torchjd import aggregation

    return aggregation.UPGrad()(seeded(2, 6).to(device))


@program("jaxtyping", "annotated shapes are checked")
def jaxtyping_shapes(device: str) -> Any:
    from jaxtyping import Float

    x = seeded(3, 4).to(device)
    assert isinstance(x, Float[torch.Tensor, "a 4"])
    assert not isinstance(x, Float[torch.Tensor, "a 5"])
    return x


@program("torchviz", "a drawing of the autograd graph")
def torchviz_dot(device: str) -> Any:
    import torchviz

    model = network(3, 4, 1, device=device)
    out = model(seeded(2, 3).to(device)).sum()
    parameters = dict(model.named_parameters())
    drawn = torchviz.make_dot(out, parameters).source
    return [name in drawn for name in parameters], out
