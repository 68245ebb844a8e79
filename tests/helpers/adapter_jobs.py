"""Networks of other libraries on ranks: their adapter beside the plain module."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hires.core.errors import ConfigError
from hires.core.ranks.world import World
from tests.helpers.shard_jobs import network, torch_world


def infer_with_monai(world: World) -> list[float]:
    """Returns the largest differences from the plain network, of several sizes and networks."""
    from monai.data import MetaTensor
    from monai.networks.nets import UNet

    from hires.adapters.monai_inferer import TiledInferer

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"channels": (4, 8, 16), "strides": (2, 2), "num_res_units": 1}
    nets = [UNet(2, 3, 2, norm=norm, **sizes).double().eval() for norm in ("batch", "instance")]
    errors = []
    with torch_world(world), torch.no_grad():
        mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("rows", "cols"))
        inferer = TiledInferer(mesh)
        for net, size in zip((*nets, nets[1]), ((32, 40), (48, 24), (24, 12)), strict=True):
            # The last images have the size of a window of those before them.
            images = MetaTensor(torch.randn(2, 3, *size).double(), meta={"pixel_mm": 0.5})
            made = inferer(images, net)
            assert made.meta["pixel_mm"] == 0.5
            errors.append(float((made - net(images)).as_tensor().abs().max()))
        try:
            inferer(images, net, 3)
            errors.append(1.0)
        except ConfigError:
            pass
    return errors


def decode_with_diffusers(world: World) -> list[float]:
    """Returns the largest differences of decoded latents of two sizes."""
    from hires.adapters.diffusers_decoder import shard_decoder

    plain = small_vae()
    vae = copy.deepcopy(plain)
    errors = []
    with torch_world(world), torch.no_grad():
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tiles",))
        shard_decoder(vae, mesh, example=torch.empty(1, 4, 8, 6).double())
        for size in ((8, 6), (4, 6), (9, 5)):  # the second is that of a window of the first
            latents = torch.randn(1, 4, *size).double()
            made, wanted = vae.decode(latents).sample, plain.decode(latents).sample
            assert made.shape == (1, 3, 2 * size[0], 2 * size[1])
            errors.append(float((made - wanted).abs().max()))
        assert [*vae.state_dict()] == [*plain.state_dict()]
    return errors


def small_vae() -> Any:
    """Returns an AutoencoderKL of float64 with random weights, the same on every rank."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2}
    kinds |= {"up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes: dict[str, Any] = {"block_out_channels": (8, 16), "norm_num_groups": 4}
    vae = AutoencoderKL(latent_channels=4, sample_size=16, **kinds, **sizes)
    return vae.double().eval()


def train_with_lightning(
    world: World, net: str, tiles: list[int], gather: str
) -> tuple[list[str], list[float]]:
    """Returns the parameters' names and their largest differences after three steps of AdamW."""
    import lightning.pytorch as lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    import hires
    from hires.adapters.lightning_module import TiledLightningModule

    class Module(TiledLightningModule):
        def training_step(self, batch: Any, number: int) -> Tensor:
            images, target = batch
            made = self.model(images)
            if gather == "local":
                rows, cols = hires.window(images.shape, self.mesh["rows", "cols"])
                target = target[..., rows, cols]
            return functional.mse_loss(made, target, reduction="sum") / (images[:, :1].numel() * 4)

        def train_dataloader(self) -> Any:
            return DataLoader(data, batch_size=2, sampler=self.sampler(data, shuffle=False))

        def configure_optimizers(self) -> Any:
            return optimizer_of(self)

    plain, data, replicas = network(net), small_images(), world.size // (tiles[0] * tiles[1])
    place = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size}
    os.environ.update({key: str(value) for key, value in place.items()})
    with torch_world(world), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Module(copy.deepcopy(plain), tiles, torch.empty(2, 3, 20, 14).double(), gather)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=world.size, strategy="ddp", use_distributed_sampler=False,
            max_steps=3, gradient_clip_val=0.5, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
            # Its search for another one imports mpi4py, which fails where there is no MPI.
            plugins=[LightningEnvironment()],
        )  # fmt: skip
        trainer.fit(module)
        optimizer = optimizer_of(plain)
        for step in range(3):
            # Samples go to replicas in turn.
            images, target = data[2 * replicas * step : 2 * replicas * (step + 1)]
            optimizer.zero_grad()
            (functional.mse_loss(plain(images), target)).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
    pairs = zip(module.model.parameters(), plain.parameters(), strict=True)
    names = [name for name, _ in module.named_parameters()]
    return names, [float((a - b).detach().abs().max()) for a, b in pairs]


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW; eps as in ``train_beside_plain``."""
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)


def small_images() -> TensorDataset:
    """Returns images and maps of four channels, for three steps of two replicas."""
    numbers = torch.Generator().manual_seed(4)
    return TensorDataset(
        *(torch.randn(12, channels, 20, 14, generator=numbers).double() for channels in (3, 4))
    )
