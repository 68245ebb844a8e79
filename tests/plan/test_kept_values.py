"""What the table says that a training keeps of an operator is what torch saves of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hires.plan.operators.operator_facts import OPERATORS, kept_of

SHAPE = (2, 4, 8, 8)
INDEX, PLACES = torch.tensor([0, 2]), torch.zeros(SHAPE, dtype=torch.int64)
MASK, MAP = torch.rand(SHAPE) > 0.5, torch.rand(SHAPE)
NORM = None, None, None, None, True, 0.1, 1e-5, False

ARGUMENTS: list[tuple[str, tuple[Any, ...]]] = [
    ("conv2d conv_transpose2d", (torch.rand(4, 4, 3, 3),)),
    ("linear", (torch.rand(8, 8),)),
    ("prelu", (torch.ones(1),)),
    ("batch_norm instance_norm", NORM),
    ("group_norm channel_shuffle max_pool2d avg_pool2d pixel_shuffle pixel_unshuffle", (2,)),
    ("layer_norm rms_norm", ([8], torch.rand(8))),
    ("softmax log_softmax _safe_softmax glu logsumexp std std_mean unsqueeze", (1,)),
    ("cumsum cumprod logcumsumexp cummax cummin median nanmedian sort mode", (1,)),
    ("topk kthvalue chunk split tensor_split", (2, 1)),
    ("split_with_sizes unflatten", ([1, 3], 1)),
    ("unflatten", (1, [2, 2])),
    ("dropout feature_dropout alpha_dropout feature_alpha_dropout", (0.5, True)),
    ("rrelu", (0.1, 0.3, True)),
    ("index_select", (1, INDEX)),
    ("index_fill", (1, INDEX, 0.0)),
    ("index", ([None, INDEX],)),
    ("gather", (1, PLACES)),
    ("take_along_dim", (PLACES, 1)),
    ("scatter scatter_add", (1, PLACES, MAP)),
    ("scatter_reduce", (1, PLACES, MAP, "sum")),
    ("select", (1, 0)),
    ("flip", ([1],)),
    ("roll", ([1], [2])),
    ("threshold", (0.5, 0.0)),
    ("masked_fill", (MASK, 0.0)),
    ("pow", (2.0,)),
    ("lerp", (MAP, MAP)),
    ("adaptive_avg_pool2d adaptive_max_pool2d", ([3, 3],)),
    ("pad constant_pad_nd reflection_pad2d replication_pad2d", ([1, 1, 1, 1],)),
    ("upsample_nearest2d _upsample_nearest_exact2d", ([16, 16],)),
    ("upsample_bilinear2d upsample_bicubic2d", ([16, 16], False)),
    ("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", ([16, 16], False)),
    ("repeat_interleave", (2, 2)),
    ("repeat tile", ([1, 2, 1, 1],)),
    ("expand", (SHAPE,)),
    ("view _unsafe_view reshape", ([2, -1],)),
    ("permute", ([0, 2, 3, 1],)),
    ("transpose movedim moveaxis swapaxes swapdims", (1, 3)),
]
"""Operators and their arguments behind the first; others take one to three maps."""
CALLS: dict[str, Callable[[Tensor], Any]] = {
    **{name: lambda x: torch.cat([x, x]) for name in ("cat", "concat", "concatenate")},
    "stack": lambda x: torch.stack([x, x]),
    "where": lambda x: torch.where(MASK, x, 0.0),
    "mm": lambda x: torch.mm(x[0, 0], x[0, 1]),
    "mv": lambda x: torch.mv(x[0, 0], x[0, 1, 0]),
    "bmm": lambda x: torch.bmm(x[0], x[1]),
    "addmm": lambda x: torch.addmm(x[0, 0], x[0, 1], x[0, 2]),
    "baddbmm": lambda x: torch.baddbmm(x[0], x[1], x[1]),
    "einsum": lambda x: torch.einsum("nchw,ncvw->nchv", x, x),
    "tensordot": lambda x: torch.tensordot(x, x, ([1, 2, 3], [1, 2, 3])),
}
UNTRIED = (
    "conv1d conv3d conv_transpose1d conv_transpose3d lstm gru rnn_tanh rnn_relu getitem as_strided "
    "view_as_complex view_as_real t matrix_H embedding expit equal_nan"
)
ROUGH = {"max", "min"}
"""With a dim torch keeps places, without one the input and the value."""


def saved(call: Callable[..., Any], *others: Any) -> set[str] | None:
    """Returns what torch saves of a call, in the words of the table; None: it has no gradient."""
    others = tuple(
        one.clone().requires_grad_() if isinstance(one, Tensor) and one.is_floating_point() else one
        for one in others
    )
    x, kept = (MAP * 0.8 + 0.1).requires_grad_() * 1, list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = call(x, *others)
    results = out if isinstance(out, tuple | list) else [out]
    values = [one for one in results if isinstance(one, Tensor)]
    if not any(one.requires_grad for one in values):
        return None
    words = {id_of(one): "value" for one in values}
    for one in (x, *others, INDEX, MASK):
        if isinstance(one, Tensor):
            words[id_of(one)] = "inputs" if one.shape == SHAPE and one.requires_grad else ""
    found = set()
    for tensor in kept:
        word, is_index = words.get(id_of(tensor), "more"), tensor.dtype == torch.int64
        if word == "more" and tensor.numel() < values[0].numel():
            word = ""  # as the mean of each channel
        found.add("places" if is_index and word else word)
    return found - {""}


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def examples() -> Iterator[tuple[str, set[str] | None]]:
    """Yields every operator that can be called, with what torch saves."""
    own = {name: [args] for names, args in ARGUMENTS for name in names.split()}
    for name, facts in ((name, OPERATORS[name]) for name in OPERATORS):
        call = CALLS.get(name, getattr(torch.ops.aten, name, None))
        if call is None or facts.quantized or facts.is_identity or facts.ends_gradient:
            continue
        for others in [()] if name in CALLS else own.get(name, [(MAP,) * n for n in range(3)]):
            with contextlib.suppress(RuntimeError, TypeError, IndexError):
                yield name, saved(call, *others)
                break


@pytest.mark.filterwarnings("ignore")
def test_table_names_what_torch_saves_of_every_operator():
    seen = dict(examples())
    declared = {
        name: {"inputs" if word == "factors" else word for word in kept_of(OPERATORS[name])}
        for name in seen
    }
    wrong = {n: words for n, words in seen.items() if words is not None and words != declared[n]}
    assert wrong == {name: {"inputs", "value"} for name in ROUGH}
    factors = [name for name in seen if "factors" in kept_of(OPERATORS[name])]
    assert [saved(getattr(torch, name), 2.0) for name in factors] == [set()] * 5
    untried = {name for name in {*OPERATORS} - {*seen} if needs_example(name)}
    assert untried == {*UNTRIED.split()}


def needs_example(name: str) -> bool:
    facts = OPERATORS[name]
    hidden = facts.quantized or facts.is_identity or facts.ends_gradient or facts.copies_weight
    return not hidden and not name.startswith(("fused_", "bitwise_", "__"))
