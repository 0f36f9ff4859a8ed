"""Images: models, augmentation, losses."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.integrations.programs import program, seeded, trained


@program("timm", "ResNet-10t, ViT tiny and ConvNeXt atto, forward and gradients")
def timm_models(device: str) -> Any:
    import timm

    results = []
    for name in ("resnet10t", "vit_tiny_patch16_224", "convnext_atto"):
        torch.manual_seed(0)
        more = {"img_size": 32} if "vit" in name else {}
        model = timm.create_model(name, num_classes=5, **more).to(device).eval()
        out = model(seeded(2, 3, 32, 32).to(device))
        out.square().mean().backward()
        results += [out, *[p.grad for p in list(model.parameters())[:4]]]
    return results


@program("timm", "its optimizers: AdamP, Lamb, Lion, Adafactor")
def timm_optimizers(device: str) -> Any:
    from timm.optim import create_optimizer_v2

    results = []
    for name in ("adamp", "lamb", "lion", "adafactor"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(device)
        inputs = seeded(4, 6).to(device)
        optimizer = create_optimizer_v2(model, opt=name, lr=1e-2)
        results += trained(model, lambda m=model, x=inputs: m(x).square().mean(), optimizer=optimizer)
    return results


@program("timm", "mixup, EMA of a model")
def timm_training_parts(device: str) -> Any:
    import numpy as np
    from timm.data import Mixup
    from timm.utils import ModelEmaV3

    np.random.seed(0)
    mixed, targets = Mixup(mixup_alpha=0.5, num_classes=4)(
        seeded(4, 3, 8, 8).to(device), torch.arange(4).to(device)
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).to(device)
    average = ModelEmaV3(model, decay=0.5)
    with torch.no_grad():
        model.weight += 1
    average.update(model)
    return mixed, targets, average.module.weight


@program("torchvision", "ResNet-18 and MobileNet v3, forward and gradients; its transforms v2")
def torchvision_models(device: str) -> Any:
    import torchvision
    from torchvision.transforms import v2

    results = []
    for make in (torchvision.models.resnet18, torchvision.models.mobilenet_v3_small):
        torch.manual_seed(0)
        model = make(num_classes=5).to(device).eval()
        out = model(seeded(2, 3, 32, 32).to(device))
        out.square().mean().backward()
        results += [out, next(model.parameters()).grad]
    image = (seeded(3, 20, 24).abs() * 50).clamp(0, 255).to(torch.uint8).to(device)
    chain = v2.Compose(
        [
            # First: bytes are resized in bytes on the CPU and in float32 on all other devices.
            v2.ToDtype(torch.float32, scale=True),
            v2.Resize((16, 16)),
            v2.CenterCrop(12),
            v2.GaussianBlur(3, 1.0),
        ]
    )
    return [*results, chain(image)]


@program("kornia", "blur, edges, a warp by a homography, Lab colours, SSIM")
def kornia_images(device: str) -> Any:
    import kornia

    image = seeded(2, 3, 16, 16).abs().clamp(0, 1).to(device).requires_grad_()
    turn = torch.tensor([[0.9, -0.1, 1.0], [0.1, 0.9, 0.5], [0.0, 0.0, 1.0]], device=device).expand(2, 3, 3)
    blurred = kornia.filters.gaussian_blur2d(image, (5, 5), (1.5, 1.5))
    edges = kornia.filters.sobel(image)
    warped = kornia.geometry.warp_perspective(image, turn, (16, 16))
    lab = kornia.color.rgb_to_lab(image)
    loss = kornia.losses.ssim_loss(blurred, image, 5) + edges.mean() + warped.mean()
    loss.backward()
    return blurred, edges, warped, lab, loss, image.grad


@program("kornia", "augmentation with fixed angles")
def kornia_augmentation(device: str) -> Any:
    import kornia.augmentation as K

    image = seeded(2, 3, 16, 16).abs().clamp(0, 1)
    chain = K.AugmentationSequential(
        K.RandomHorizontalFlip(p=1.0), K.RandomRotation((30.0, 30.0), p=1.0), K.CenterCrop(8)
    )
    return chain(image.to(device))


@program("segmentation-models-pytorch", "U-Net, Dice loss, three steps")
def segmentation(device: str) -> Any:
    import segmentation_models_pytorch as smp

    torch.manual_seed(0)
    # In float64, where rounding hides no wrong value: in float32 the two devices differed by 8e-3, and a batch norm
    # over two numbers (the last, of two images of one pixel) is not known to be the reason.
    model = smp.Unet("resnet18", encoder_weights=None, classes=2).double().to(device)
    images, masks = seeded(2, 3, 32, 32).double().to(device), (seeded(2, 2, 32, 32) > 0).double().to(device)
    loss = smp.losses.DiceLoss("multilabel")
    return trained(model, lambda: loss(model(images), masks))


@program("vit-pytorch", "ViT, gradients")
def vit_pytorch(device: str) -> Any:
    from vit_pytorch import ViT

    torch.manual_seed(0)
    model = ViT(image_size=16, patch_size=4, num_classes=5, dim=16, depth=2, heads=2, mlp_dim=32).to(device)
    out = model(seeded(2, 3, 16, 16).to(device))
    out.square().sum().backward()
    return out, [p.grad for p in model.parameters()]


@program("pytorch-msssim", "SSIM and its gradient")
def msssim(device: str) -> Any:
    from pytorch_msssim import ssim

    a = seeded(2, 3, 24, 24).abs().to(device).requires_grad_()
    value = ssim(a, (seeded(2, 3, 24, 24) * 0.9).abs().to(device), data_range=1.0)
    value.backward()
    return value, a.grad


@program("monai", "3-d U-Net, Dice loss, three steps; sliding window, Dice metric")
def monai_volumes(device: str) -> Any:
    from monai.inferers import sliding_window_inference
    from monai.losses import DiceLoss
    from monai.metrics import DiceMetric
    from monai.networks.nets import UNet

    torch.manual_seed(0)
    model = UNet(3, 1, 2, channels=(4, 8), strides=(2,), num_res_units=1).to(device)
    volume, mask = seeded(1, 1, 8, 8, 8).to(device), (seeded(1, 2, 8, 8, 8) > 0).float().to(device)
    loss = DiceLoss(sigmoid=True)
    losses = trained(model, lambda: loss(model(volume), mask))
    model.eval()
    with torch.no_grad():
        windows = sliding_window_inference(volume, (4, 4, 4), 2, model)
    return losses, windows, DiceMetric()((windows > 0).float(), mask)


@program("monai", "transforms: zoom, rotate, scale the intensity")
def monai_transforms(device: str) -> Any:
    from monai.transforms import Rotate, ScaleIntensity, Zoom

    image = seeded(1, 12, 12).to(device)
    return [t(image).as_tensor() for t in (Zoom(1.5), Rotate(0.3), ScaleIntensity())]


@program("open_clip_torch", "a small CLIP, contrastive loss and gradients")
def open_clip(device: str) -> Any:
    from open_clip.model import CLIP

    torch.manual_seed(0)
    model = CLIP(
        embed_dim=16,
        vision_cfg={"layers": 2, "width": 32, "patch_size": 8, "image_size": 16, "head_width": 16},
        text_cfg={"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 2},
    ).to(device)
    images, words = seeded(3, 3, 16, 16).to(device), torch.arange(24).reshape(3, 8).to(device)
    left, right, scale = model(images, words)
    loss = F.cross_entropy(scale * left @ right.T, torch.arange(3, device=device))
    loss.backward()
    return left, right, loss, model.visual.conv1.weight.grad


@program("diffusers", "UNet2DModel with DDIM and Euler, four steps each; an AutoencoderKL")
def diffusers_parts(device: str) -> Any:
    import diffusers

    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).to(device).eval()  # fmt: skip
    results = []
    for scheduler in (diffusers.DDIMScheduler(), diffusers.EulerDiscreteScheduler()):
        scheduler.set_timesteps(4)
        x = seeded(1, 3, 8, 8).to(device)
        with torch.no_grad():
            for step in scheduler.timesteps:
                noise = unet(scheduler.scale_model_input(x, step), step).sample
                x = scheduler.step(noise, step, x).prev_sample
        results.append(x)
    torch.manual_seed(0)
    vae = (
        diffusers.AutoencoderKL(block_out_channels=(16,), norm_num_groups=8, latent_channels=2)
        .to(device)
        .eval()
    )
    with torch.no_grad():
        results.append(vae.decode(vae.encode(seeded(1, 3, 8, 8).to(device)).latent_dist.mean).sample)
    return results


@program("diffusers", "a pipeline with a Generator of the CPU, and one of the device draws the same twice")
def diffusers_pipeline(device: str) -> Any:
    import diffusers

    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    pipe = diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler()).to(device)
    pipe.set_progress_bar_config(disable=True)
    image = pipe(generator=torch.Generator().manual_seed(0), num_inference_steps=3, output_type="np").images
    mine = [
        pipe(generator=torch.Generator(device).manual_seed(0), num_inference_steps=2, output_type="np").images
        for _ in range(2)
    ]
    assert (mine[0] == mine[1]).all()
    return torch.from_numpy(image).to(device)


@program("lpips", "the distance with untrained weights, and its gradient")
def lpips_distance(device: str) -> Any:
    import lpips

    torch.manual_seed(0)
    distance = lpips.LPIPS(net="squeeze", pretrained=False, pnet_rand=True, verbose=False).to(device)
    a = seeded(1, 3, 32, 32).to(device).requires_grad_()
    value = distance(a, seeded(1, 3, 32, 33)[..., :32].to(device))
    value.sum().backward()
    return value, a.grad


@program("deepinv", "blur, its adjoint, total variation, gradient descent")
def deepinv_problems(device: str) -> Any:
    import deepinv

    kernel = deepinv.physics.blur.gaussian_blur(sigma=1.0, device=device)
    physics = deepinv.physics.Blur(filter=kernel, padding="circular", device=device)
    image = seeded(1, 1, 16, 16).to(device)
    blurred = physics(image)
    x = blurred.clone().requires_grad_()
    prior = deepinv.optim.TVPrior(n_it_max=5)
    loss = (physics(x) - blurred).square().sum() + prior.fn(x).sum()
    loss.backward()
    return blurred, physics.A_adjoint(blurred), x.grad
