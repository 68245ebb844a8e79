"""Recipes of docs/own-loop.md compute on tiles what other libraries compute of whole images."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.data import DistributedSampler

import hires
from hires.core.ranks.world import World
from tests.helpers.library_page import example, script
from tests.helpers.pool import preload
from tests.helpers.ranks import run_ranks
from tests.helpers.shard_jobs import torch_world

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


def train_with_lightning(world: World, gather: str) -> tuple[list[str], list[float]]:
    """Returns the parameters' names and their largest differences after an epoch of AdamW.

    ``gather=full`` is the script of the docs as it is, but for the number of ranks.
    """
    place = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size}
    place |= {"GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "none"}  # as torchrun sets them
    os.environ.update({key: str(value) for key, value in place.items()})
    text = script("LightningModule")
    changes = {"devices=2": f"devices={world.size}"}
    if gather == "local":
        part = "self.model(images), target[self.window(images)], reduction='sum') / target.numel()"
        changes["self.model(images), target)"] = part
        changes["images[:2])"] = "images[:2], gather='local')"
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    names: dict[str, Any] = {}
    same: dict[str, Any] = {}
    torch.set_default_dtype(torch.float64)
    with torch_world(world), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(text, names)
        exec(text[: text.index("module = ")], same)
    plain, data, replicas = same["network"], same["data"], world.size // 2
    parts = [[*DistributedSampler(data, replicas, k)] for k in range(replicas)]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(len(parts[0]) // 2):
        images, target = data[[i for part in parts for i in part[2 * step : 2 * step + 2]]]
        optimizer.zero_grad()
        functional.mse_loss(plain(images), target).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    trained = names["module"]
    pairs = zip(trained.model.parameters(), plain.parameters(), strict=True)
    errors = [float((a - b).detach().abs().max()) for a, b in pairs]
    return [name for name, _ in trained.named_parameters()], errors


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
@pytest.mark.parametrize(("ranks", "gather"), [(2, "full"), (4, "local")])
def test_script_of_lightning_moves_the_parameters_as_plain_torch_does(ranks, gather, tmp_path):
    pytest.importorskip("lightning", reason="needs the extra recipes")
    with contextlib.chdir(tmp_path):  # where Lightning keeps its logs
        answers = run_ranks(train_with_lightning, ranks, gather)
    for names, errors in answers:
        assert "model.0.weight" in names
        assert max(errors) < 1e-10
