"""A network of the user's own comes in by name, and what is wrong with it is said in his words."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hires.core.errors import ConfigError
from hires.nets import custom as network
from hires.nets.custom import custom

_numbers = itertools.count()
Write = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes the user's file into the current folder; returns its module name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    made = []

    def write(text: str) -> str:
        made.append(f"my_net_{next(_numbers)}")
        (tmp_path / f"{made[-1]}.py").write_text("from torch import nn\n" + text)
        return made[-1]

    yield write
    for name in made:
        sys.modules.pop(name, None)


def refusal(target: str, **args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        custom(target, args)
    text = str(caught.value)
    assert "\n" not in text
    assert target in text
    return text


def test_function_or_class_in_the_current_folder(module):
    name = module("def net(width=4):\n    return nn.Conv2d(3, width, 1)\n")
    assert custom(f"{name}:net", {}).out_channels == 4
    assert custom(f"{name}:net", {"width": 9}).out_channels == 9
    assert isinstance(custom("torch.nn:Conv2d", dict.fromkeys(CONV, 1)), nn.Conv2d)


CONV = ("in_channels", "out_channels", "kernel_size")


def test_module_that_does_not_exist(module):
    text = refusal("no_such_package.net:build")
    assert "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'" in text
    assert f"or below {Path.cwd()}" in text


@pytest.mark.parametrize("target", [":build", ".net:build"])
def test_name_that_is_no_module(target):
    assert "cannot be imported: " in refusal(target)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import not_installed\n", "ModuleNotFoundError: No module named 'not_installed'"),
        # Only failed imports were caught; anything else in the user's file gave a traceback.
        ("def net(:\n", "SyntaxError: "),
        ("raise ValueError('no weights')\n", "ValueError: no weights"),
        ("import sys\nsys.exit('usage: train.py DATA')\n", "SystemExit: usage: train.py DATA"),
    ],
)
def test_module_that_cannot_be_imported_says_why(module, text, expected):
    assert f"cannot be imported: {expected}" in refusal(f"{module(text)}:net")


def test_missing_function_is_answered_with_those_there_are(module):
    name = module("def small():\n    pass\nclass Large(nn.Module):\n    pass\nsize = 3\n")
    assert refusal(f"{name}:smal").endswith(f"{name} has no function 'smal'; did you mean small?")
    assert refusal(f"{name}:nothere").endswith("has no function 'nothere'; it has small, Large")
    assert "no function 'size'" in refusal(f"{name}:size")
    assert refusal(f"{module('size = 3')}:net").endswith("it has none at all")


def test_arguments_that_do_not_fit_show_the_signature(module):
    name = module("def net(width, depth=2):\n    return nn.Conv2d(3, width, 1)\n")
    assert refusal(f"{name}:net", widht=3) == (
        f"model.args={{'widht': 3}} do not fit {name}:net(width, depth=2): missing a required "
        f"argument: 'width'"
    )
    assert "unexpected keyword argument 'deep'" in refusal(f"{name}:net", width=3, deep=1)


def test_function_that_fails_says_where(module):
    # A TypeError of the function's own was called a wrong argument.
    name = module("def net(width):\n    return nn.Conv2d(3, width + [], 1)\n")
    text = refusal(f"{name}:net", width=3)
    assert "failed with model.args={'width': 3}: TypeError: unsupported operand" in text
    assert text.endswith(f"{name}.py:3)")


def test_function_that_returns_no_module(module):
    name = module("def net():\n    return nn.Conv2d\n")
    assert refusal(f"{name}:net").endswith("returned type, not a torch.nn.Module")


def test_network_without_memory_is_refused(module):
    name = module("def net():\n    return nn.Sequential(nn.Conv2d(3, 4, 1, device='meta'))\n")
    assert refusal(f"{name}:net").endswith("leaves 0.weight on the meta device; make it on the CPU")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_script_module_is_an_error(module):
    name = module("import torch\n\n\ndef net():\n    return torch.jit.script(nn.Conv2d(3, 8, 3))\n")
    assert "returned a ScriptModule; return the plain nn.Module" in refusal(f"{name}:net")


def test_file_that_has_not_changed_is_read_once_for_many_traces(module, tmp_path, monkeypatch):
    # A search traces a network several times, and its libraries may have thousands of files.
    name = module("def net():\n    return nn.Conv2d(3, 4, 1)\n")
    custom(f"{name}:net", {})
    path, read = tmp_path / f"{name}.py", []
    monkeypatch.setattr(network, "sha256_of", lambda path: read.append(path) or "0")
    network._sha256_at.cache_clear()
    for _ in range(3):
        network.source_hashes([path])
    assert read.count(path) == 1
    os.utime(path, ns=(1, 1))
    network.source_hashes([path])
    assert read.count(path) == 2
    network._sha256_at.cache_clear()
