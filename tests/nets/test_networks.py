"""The networks are the published ones, take images of any size, and begin small enough to learn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hires.core.config.model_config import ModelConfig
from hires.core.errors import ConfigError
from hires.nets.build_network import build_model, materialise
from hires.nets.trace import trace
from hires.networks.amoebanet import Cell, FactorizedReduction
from hires.networks.edsr import ResidualBlock
from hires.networks.inception_bn import InceptionBlock
from hires.networks.unet import InterpolatedUp, TransposedUp


def network(name: str, image: Sequence[int] = (32, 32), **keys: object) -> nn.Module:
    """Returns a network without memory."""
    config = ModelConfig(name=name, **{"classes": 10, **keys})
    return build_model(config, 0, (image[0], image[1]))


def filled(name: str, image: Sequence[int] = (32, 32), **keys: object) -> nn.Module:
    model = network(name, image, **keys)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    materialise(model, list(model.state_dict()), seed=0)
    return model.train()


COUNTED = {
    "resnet depth=18 classes=1000": 11_689_512,
    "resnet depth=50 classes=1000": 25_557_032,
    "resnet depth=152 classes=1000": 60_192_808,
    # MPI4DL's at 32x32 with 10 classes, its unused norms included.
    "mpi4dl_resnet depth=11 head=pool": 466_384,
    "mpi4dl_resnet depth=110 head=flatten": 7_185_008,
    "amoebanet layers=18 filters=208 classes=1000": 81_505_540,
    "amoebanet layers=18 filters=416": 312_433_690,
    # Of the authors, but for the shifts of the mean.
    "edsr blocks=16 width=64 scale=2": 1_369_859,
    "edsr blocks=16 width=64 scale=3": 1_554_499,
    "edsr blocks=32 width=256 scale=4": 43_089_923,
    # Of the published ports of BN-Inception, which have the same widths.
    "inception_bn classes=1000": 11_295_240,
    "unet levels=4 width=64 classes=2": 31_037_698,
}


def of_words(words: str) -> nn.Module:
    name, *pairs = words.split()
    split = (pair.split("=") for pair in pairs)
    return network(name, **{k: int(v) if v.isdigit() else v for k, v in split})


@pytest.mark.parametrize("words", COUNTED)
def test_parameters_are_as_many_as_published(words):
    assert sum(p.numel() for p in of_words(words).parameters()) == COUNTED[words]


SMALL = {
    "resnet": {"depth": 18}, "preact_resnet": {"depth": 11}, "mpi4dl_resnet": {"depth": 11},
    "amoebanet": {"layers": 3, "filters": 8}, "inception_bn": {},
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_logits_do_not_depend_on_the_size_of_the_image_and_begin_about_one(name):
    model = network(name, **SMALL[name], classes=7, channels=4)
    assert model(torch.empty(2, 4, 75, 61, device="meta")).shape == (2, 7)
    model = filled(name, **SMALL[name])
    output = model(torch.randn(3, 3, 45, 38, generator=torch.Generator().manual_seed(1)))
    # He's first values keep the signal's size through the layers, so that training can begin.
    assert 0.05 < output.std() < 5
    # A softmax before the cross-entropy trains to a loss that never gets small.
    assert output.min() < 0
    output.square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("upsample", ["transposed", "bilinear", "nearest"])
def test_unet_gives_every_pixel_its_classes(upsample):
    model = filled("unet", levels=3, width=4, upsample=upsample, classes=5)
    kinds = {type(module) for module in model.modules()}
    assert (nn.ConvTranspose2d in kinds) == (upsample == "transposed")
    x = torch.randn(2, 3, 33, 31, generator=torch.Generator().manual_seed(1), requires_grad=True)
    output = model(x)
    assert output.shape == (2, 5, 33, 31)
    loss = F.cross_entropy(output, torch.zeros(2, 33, 31, dtype=torch.int64))
    assert float(loss.detach()) == pytest.approx(math.log(5), rel=0.1)  # that of a guess
    output[0, :, 16, 15].sum().backward()
    assert min(x.grad[0, :, 16, 15].abs().sum(), x.grad[0, :, 2, 3].abs().sum()) > 0
    assert model.to("meta")(torch.empty(2, 3, 1, 3, device="meta")).shape == (2, 5, 1, 3)


def test_ways_up_come_to_the_size_of_the_skip():
    up, x = TransposedUp(2), torch.randn(1, 4, 3, 4)
    for rows, cols in ((5, 8), (6, 7), (6, 8)):
        assert torch.equal(up(x, (rows, cols)), up.conv(x)[:, :, :rows, :cols])
    for mode in ("bilinear", "nearest"):
        up = InterpolatedUp(2, mode)
        assert torch.equal(up(x, (5, 8)), up.conv(F.interpolate(x, (5, 8), mode=mode)))


def test_first_output_of_edsr_is_of_the_size_of_the_image():
    for scale in (2, 3):
        model = network("edsr", blocks=1, width=4, scale=scale, channels=2)
        for rows, cols in ((7, 13), (1, 2)):
            output = model(torch.empty(2, 2, rows, cols, device="meta"))
            assert output.shape == (2, 2, scale * rows, scale * cols)
    block, x = ResidualBlock(3, 0.1, blocks=1), torch.randn(1, 3, 6, 5)
    torch.testing.assert_close(block(x), x + 0.1 * block.conv2(block.conv1(x).clamp(0)))
    model = filled("edsr", blocks=1, width=4).requires_grad_(False)
    x = torch.randn(1, 3, 6, 5)
    head = model.head(x)
    torch.testing.assert_close(
        model(x), model.tail(model.upsample(head + model.after(model.body(head))))
    )
    # Without norms the usual first values grow threefold a block: 16 blocks began at a thousand.
    for blocks in (2, 32):
        model = filled("edsr", blocks=blocks, width=16)
        with torch.no_grad():
            output = model(torch.randn(1, 3, 24, 24, generator=torch.Generator().manual_seed(1)))
        assert 0.05 < output.std() < 5


def test_maps_have_the_published_sizes():
    graph = trace(network("preact_resnet", depth=11), [1, 3, 20, 18], training=True)
    # A block that projects does so behind its first norm and ReLU.
    assert graph.by_name["group1.0.projection"].inputs == graph.by_name["group1.0.conv1"].inputs
    sums = [(node.layer, node.shape) for node in graph.nodes if node.kind == "add"]
    assert sums == [
        ("group1.0", [1, 64, 20, 18]), ("group2.0", [1, 128, 10, 9]), ("group3.0", [1, 256, 5, 5]),
    ]  # fmt: skip
    shapes: list[list[int]] = []
    amoebanet = network("amoebanet", layers=3, filters=8)
    inception = network("inception_bn", classes=1000)
    for module in (*amoebanet.modules(), *inception.modules()):
        if isinstance(module, (Cell, InceptionBlock)):
            module.register_forward_hook(lambda _, x, y: shapes.append([*tensor_of(y).shape]))
    amoebanet(torch.empty(2, 3, 75, 61, device="meta"))
    maps = [tuple(shape[2:]) for shape in shapes]
    assert [*dict.fromkeys(maps)] == [(19, 16), (10, 8), (5, 4), (3, 2)]  # all halvings round up
    shapes.clear()
    with FlopCounterMode(display=False) as counter:
        inception(torch.empty(1, 3, 224, 224, device="meta"))
    # Ioffe and Szegedy, Figure 5: 28, 14 and 7 pixels behind the pools of a 224x224 image. The
    # pools here drop an incomplete window, as MXNet's do: 27 pixels, then 14 and 7.
    widths = [256, 320, 576, 576, 576, 608, 608, 1056, 1024, 1024]
    sizes = [27] * 2 + [14] * 5 + [7] * 3
    assert shapes == [[1, width, size, size] for width, size in zip(widths, sizes, strict=True)]
    kinds = {nn.AvgPool2d: "avg", nn.MaxPool2d: "max"}
    pools = [kinds[type(m)] for m in inception.blocks.modules() if type(m) in kinds]
    assert " ".join(pools) == "avg avg max avg avg avg avg max avg max"
    # The published ports' pools keep an incomplete window.
    assert counter.get_total_flops() / 2 == pytest.approx(2_048e6, rel=0.04)


def tensor_of(output: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return output if isinstance(output, Tensor) else output[1]


def plain_reduction(module: FactorizedReduction, x: Tensor) -> Tensor:
    """Pixel by pixel: (2i, 2j) for the first half of the channels, (2i+1, 2j+1) for the second."""
    n, _, height, width = x.shape
    rows, cols = -(-height // 2), -(-width // 2)
    first, second = (conv.weight[:, :, 0, 0] for conv in (module.conv1, module.conv2))
    made = torch.zeros(n, len(first) + len(second), rows, cols, dtype=x.dtype)
    for i in range(rows):
        for j in range(cols):
            made[:, : len(first), i, j] = x[:, :, 2 * i, 2 * j].clamp(0) @ first.T
            if 2 * i + 1 < height and 2 * j + 1 < width:  # zero beyond the image
                made[:, len(first) :, i, j] = x[:, :, 2 * i + 1, 2 * j + 1].clamp(0) @ second.T
    return made


def test_factorized_reduction_of_amoebanet_sees_even_and_odd_pixels():
    torch.manual_seed(0)
    module = FactorizedReduction(3, 4).double().eval()
    for size in ((6, 8), (7, 5), (1, 2)):
        x = torch.randn(2, 3, *size, dtype=torch.float64)
        expected = plain_reduction(module, x) / (1 + module.bn.eps) ** 0.5
        torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)


def mpi4dl(values: dict[str, Tensor], n: int, x: Tensor) -> Tensor:
    """What the original's ``get_resnet_v2`` computes up to its softmax, norms in training."""

    def norm(name: str, x: Tensor) -> Tensor:
        weight, bias = values[f"{name}.weight"], values[f"{name}.bias"]
        return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = values[f"{name}.conv1.weight"]
        padding = (weight.shape[-1] - 1) // 2
        return F.conv2d(x, weight, values[f"{name}.conv1.bias"], stride, padding)

    x = norm("1.batch_last", conv("1", x))
    for block in range(3 * n):
        name, first = f"{block + 2}", block % n == 0
        stride = 2 if first and block else 1
        y = x if block == 0 else norm(f"{name}.r1.batch_first", x)
        y = conv(f"{name}.r1", y, stride)
        y = conv(f"{name}.r2", norm(f"{name}.r2.batch_first", y))
        y = conv(f"{name}.r3", norm(f"{name}.r3.batch_first", y))
        x = (conv(f"{name}.r4", x, stride) if first else x) + y
    end = f"{3 * n + 2}"
    x = F.avg_pool2d(norm(f"{end}.batch_last", x), 8).flatten(1)
    return F.linear(x, values[f"{end}.fc1.weight"], values[f"{end}.fc1.bias"])


@pytest.mark.parametrize(("image", "classes"), [((32, 32), 10), ((64, 96), 5)])
def test_flattened_head_computes_what_mpi4dl_does_by_the_same_names(image, classes):
    model = filled("mpi4dl_resnet", image, depth=20, head="flatten", classes=classes).double()
    x = torch.randn(2, 3, *image, dtype=torch.float64)
    expected = mpi4dl(dict(model.named_parameters()), 2, x)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    if image == (32, 32):  # where the last map is one window both heads agree
        pool = network("mpi4dl_resnet", depth=20, classes=classes).to_empty(device="cpu").double()
        pool.load_state_dict(model.state_dict())
        torch.testing.assert_close(pool.train()(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("resnet depth=42", r"model\.depth=42 .* choose one of 18, 34, 50, 101, 152"),
        ("resnext", r"unknown network 'resnext'; did you mean resnet\?"),
        ("edsr scale=1", r"model\.scale=1 .*choose one of 2, 3, 4"),
        ("amoebanet layers=4 filters=8", r"model\.layers=4 .*use 3 or 6"),
        ("amoebanet layers=1 filters=210", r"model\.layers=1 .*use 3 or 6"),
        ("unet upsample=cubic", r"model\.upsample='cubic' .* transposed, bilinear, near"),
    ],
)
def test_keys_without_a_network_are_refused_with_those_there_are(words, text):
    with pytest.raises(ConfigError, match=text):
        of_words(words)


def test_images_and_classes_that_a_network_needs_are_named():
    with pytest.raises(ConfigError, match=r"image=\[28, 64\] leaves fewer; use image=32 or more"):
        network("mpi4dl_resnet", (28, 64), depth=11, head="flatten")
    with pytest.raises(ConfigError, match=r"model\.classes is unset"):
        network("resnet", classes=None)
