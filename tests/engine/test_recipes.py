"""Recipes of docs/own-loop.md compute on tiles what other libraries compute of whole images."""

from __future__ import annotations

import copy
import math
import os
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hires
from hires.core.ranks.world import World
from tests.helpers.library_page import example
from tests.helpers.pool import preload
from tests.helpers.ranks import run_ranks
from tests.helpers.shard_jobs import network, torch_world

preload("monai.networks.nets", "tests.helpers.shard_jobs")


def infer_with_monai(world: World) -> list[float]:
    """Returns the largest differences from the plain network, of several sizes and networks."""
    from monai.data import MetaTensor
    from monai.networks.nets import UNet

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"channels": (4, 8, 16), "strides": (2, 2), "num_res_units": 1}
    nets = [UNet(2, 3, 2, norm=norm, **sizes).double().eval() for norm in ("batch", "instance")]
    errors = []
    with torch_world(world), torch.no_grad():
        mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("rows", "cols"))
        images = MetaTensor(torch.randn(2, 3, 32, 40).double(), meta={"pixel_mm": 0.5})
        names = {"torch": torch, "mesh": mesh, "images": images, "network": nets[0], "hires": hires}
        exec(example("TiledInferer"), names)
        inferer: Any = names["inferer"]
        made: Any = names["output"]
        assert made.meta["pixel_mm"] == 0.5
        errors.append(float((made - nets[0](images)).as_tensor().abs().max()))
        for size in ((48, 24), (24, 12)):  # the second is that of a window of the first
            images = torch.randn(2, 3, *size).double()
            errors.append(float((inferer(images, nets[1]) - nets[1](images)).abs().max()))
    return errors


def decode_with_diffusers(world: World) -> list[float]:
    """Returns the largest differences of decoded latents of two sizes."""
    plain = small_vae()
    vae = copy.deepcopy(plain)
    errors = []
    with torch_world(world), torch.no_grad():
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tiles",))
        latents = torch.randn(1, 4, 8, 6).double()
        names = {"torch": torch, "mesh": mesh, "latents": latents, "vae": vae, "hires": hires}
        exec(example("shard_decoder"), names)
        image: Any = names["image"]
        errors.append(float((image - plain.decode(latents).sample).abs().max()))
        for size in ((4, 6), (9, 5)):  # the first is that of a window of those before
            latents = torch.randn(1, 4, *size).double()
            made, wanted = vae.decode(latents).sample, plain.decode(latents).sample
            assert made.shape == (1, 3, 2 * size[0], 2 * size[1])
            errors.append(float((made - wanted).abs().max()))
        made, wanted = (one.decoder(sample=latents) for one in (vae, plain))
        errors.append(float((made - wanted).abs().max()))
        with pytest.raises(ValueError, match="latents alone"):
            vae.decoder(latents, latent_embeds=latents)
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


def train_with_lightning(world: World, net: str, gather: str) -> tuple[list[str], list[float]]:
    """Returns the parameters' names and their largest differences after three steps of AdamW.

    ``gather=full`` is the example of the docs, ``local`` another one.
    """
    import lightning.pytorch as lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    plain, data, replicas = network(net), small_images(), world.size // 2
    place = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size}
    os.environ.update({key: str(value) for key, value in place.items()})
    more = {
        "accelerator": "cpu", "devices": world.size, "gradient_clip_val": 0.5, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        # Its search for another one imports mpi4py, which fails where there is no MPI.
        "plugins": [LightningEnvironment()],
    }  # fmt: skip
    names: dict[str, Any] = {"torch": torch, "DataLoader": DataLoader, "data": data, "more": more}
    names |= {"Trainer": lightning.Trainer, "network": copy.deepcopy(plain), "hires": hires}
    names |= {"LightningModule": lightning.LightningModule, "math": math}
    names |= {"init_device_mesh": init_device_mesh, "DistributedSampler": DistributedSampler}
    names["images"] = torch.empty(2, 3, 20, 14).double()
    text = example("TiledLightningModule")
    if gather == "local":
        own = "self.model(images), target[self.window(images)], reduction='sum') / target.numel()"
        text = text.replace("self.model(images), target)", own)
        text = text.replace("example=images", "example=images, gather='local'")
        assert "gather='local'" in text
        assert own in text
    with torch_world(world), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(text, names)
        parts = [[*DistributedSampler(data, replicas, k)] for k in range(replicas)]
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for step in range(3):
            chosen = [i for part in parts for i in part[2 * step : 2 * step + 2]]
            images, target = data[chosen]
            optimizer.zero_grad()
            functional.mse_loss(plain(images), target).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
    trained = names["module"]
    pairs = zip(trained.model.parameters(), plain.parameters(), strict=True)
    errors = [float((a - b).detach().abs().max()) for a, b in pairs]
    return [name for name, _ in trained.named_parameters()], errors


def small_images() -> TensorDataset:
    """Returns images and maps of four channels, for three steps of two replicas."""
    numbers = torch.Generator().manual_seed(4)
    return TensorDataset(
        *(torch.randn(12, channels, 20, 14, generator=numbers).double() for channels in (3, 4))
    )


@pytest.mark.dist
def test_diffusers_decodes_what_its_plain_decoder_does():
    pytest.importorskip("diffusers", reason="needs the extra recipes")
    for errors in run_ranks(decode_with_diffusers, 2):
        assert len(errors) == 4
        assert max(errors) < 1e-12


@pytest.mark.dist
def test_monai_infers_what_the_network_computes_of_whole_images():
    pytest.importorskip("monai", reason="needs the extra recipes")
    for errors in run_ranks(infer_with_monai, 4):
        assert len(errors) == 3
        assert max(errors) < 1e-12


@pytest.mark.dist
@pytest.mark.parametrize(
    ("net", "ranks", "gather"), [("whole", 2, "local"), ("of samples", 4, "full")]
)
def test_lightning_moves_the_parameters_as_plain_torch_does(net, ranks, gather):
    pytest.importorskip("lightning", reason="needs the extra recipes")
    for names, errors in run_ranks(train_with_lightning, ranks, net, gather):
        assert "model.first.weight" in names
        assert max(errors) < 1e-10
