"""Does ``hires bench precision`` judge kernels and aims rightly, and refuse what makes no sense?"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hires.bench import onnx_files
from hires.bench.kernel_types import (
    LEFT_IN_FLOAT,
    count_graph,
    count_kernels,
    count_profile,
    kernel_seconds,
    ran_as,
)
from hires.bench.onnx_peers import onnxruntime_step, openvino_step
from hires.bench.peer_process import PeerProcess
from hires.bench.precision_bench import (
    BENCHMARK,
    join_parts,
    result_of,
    run_case,
    what_is_wrong,
)
from hires.bench.precision_cases import PEERS, PrecisionCase, PrecisionOptions, cases_of, peers_of
from hires.bench.precision_inputs import accuracy, make_inputs, set_statistics
from hires.bench.precision_table import NOTES, aims, tables
from hires.bench.ranks import stream_ranks
from hires.bench.runners import plain_module, whole_batch
from hires.bench.step_parts import CALLS, KERNELS, WAITS
from hires.core.errors import RunError
from hires.core.store.naming import plain
from hires.nets.trace import trace_config
from hires.plan import checks
from hires.plan.checks import lacks_instructions

VERBOSE = """\
onednn_verbose,v1,info,oneDNN v3.12.0
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src:f32::blocked:acdb::f0 dst:u8,,,,1
onednn_verbose,v1,primitive,exec,cpu,convolution,brg_conv_fwd:avx512_core_vnni,forward_inference,\
src:u8::blocked:acdb::f0 wei:s8:a:blocked:AcdB16a2b::f0 dst:u8::blocked:acdb::f0,,,,0.1
onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core,undef,\
src:f32::blocked:ab::f0 wei:f32::blocked:ab::f0 dst:f32::blocked:ab::f0,,,,0.1
"""


def executed(op_name, kind, *, name="a_kernel_time", cat="Node"):
    """Returns an event as ONNX Runtime 1.32 writes it into its profile."""
    shapes = [{kind: [8, 64, 64, 64]}, {"float": [64]}]
    return {"cat": cat, "name": name, "args": {"op_name": op_name, "input_type_shape": shapes}}


def node(layer, reads, kernel):
    """Returns the facts of a node as OpenVINO 2026.4 lists them."""
    return {"layerType": layer, "runtimePrecision": reads, "primitiveType": kernel}


def row(who, precision, *samples_s, ok=True):
    facts = {"name": f"{who} {precision}", "who": who, "precision": precision, "ok": ok}
    facts |= {"samples_s": [*samples_s], "step_s": {"median": float(np.median(samples_s))}}
    facts |= {
        "cpu_s": 1.0,
        "wrong": "" if ok else "kernels of another type than fp32",
        "images_per_s": 1.0,
        "peak_bytes": None,
        "agreement": 1.0,
        "signal_db": 40.0,
    }
    return {**facts, "kernels": {"f32": 3}}


def test_kernels_are_counted_by_the_type_that_they_read():
    counts = count_kernels(VERBOSE)
    assert counts == {"u8": 1, "f32": 1}
    assert not ran_as("int8", counts)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_one_kernel_of_another_type_makes_a_row_wrong(precision):
    right = {"fp32": {"f32": 105}, "bf16": {"bf16": 105}, "int8": {"u8": 104, "s8": 1}}
    assert ran_as(precision, right[precision])
    assert not ran_as(precision, {**right[precision], "f16": 1})
    assert not ran_as(precision, {})


def test_only_transposed_convolutions_of_a_quantised_network_may_be_in_float():
    assert ran_as("int8", {"u8": 19, LEFT_IN_FLOAT: 4})
    assert ran_as("fp32", {"f32": 19, LEFT_IN_FLOAT: 4})
    assert not ran_as("bf16", {"bf16": 19, LEFT_IN_FLOAT: 4})
    assert not ran_as("int8", {LEFT_IN_FLOAT: 4})


def test_profile_of_onnxruntime_counts_convolutions_and_products():
    events = [executed("QLinearConv", "uint8"), executed("QGemm", "uint8")]
    events += [executed("Conv", "float"), executed("ConvTranspose", "float")]
    events += [executed("QLinearAdd", "uint8"), executed("Transpose", "uint8")]
    events += [executed("Conv", "float", name="a_fence_before")]
    events += [{"cat": "Session", "name": "model_run", "args": {}}]
    assert count_profile(events) == {"u8": 2, "f32": 1, LEFT_IN_FLOAT: 1}


def test_graph_of_openvino_counts_convolutions_and_products():
    nodes = [node("Convolution", "bf16", "brgconv_avx512_1x1_bf16")]
    nodes += [node("FullyConnected", "f32", "gemm_mlas_f32")]
    nodes += [node("Convolution", "u8", "brgconv_avx512_I8")]
    nodes += [node("Deconvolution", "i8", "jit_avx512_I8"), node("Pooling", "u8", "jit_avx512_I8")]
    nodes += [node("Const", "f32", "unknown_f32"), node("Reorder", "u8", "jit_uni_I8")]
    assert count_graph(nodes) == {"bf16": 1, "f32": 1, "u8": 1, "s8": 1}


def test_openvino_kernel_that_converts_integers_counts_as_what_it_computes_in():
    assert count_graph([node("MatMul", "u8", "ref_any_f32")]) == {"f32": 1}


def test_each_library_runs_its_precisions():
    listed = [*peers_of(PrecisionOptions(precisions=("bf16", "int8")))]
    assert ("onnxruntime", "bf16") not in listed
    assert ("openvino", "bf16") in listed
    eight = {peer for peer, precision in listed if precision == "int8"}
    assert eight == {"onnxruntime", "openvino"}
    assert len(listed) == 5


def test_missing_extra_is_named_with_its_remedy(monkeypatch):
    present = {"onnx": object()}
    monkeypatch.setattr(onnx_files.util, "find_spec", present.get)
    with pytest.raises(RunError, match=r"^onnxscript, .*nncf not installed: pip install 'hires\["):
        onnx_files.require_packages()


@pytest.mark.slow
def test_library_that_is_not_installed_is_a_row_with_the_remedy():
    missing = [name for name in onnx_files.PACKAGES if not onnx_files.util.find_spec(name)]
    if not missing:
        pytest.skip("the extra hires[peers] is installed")
    peer = PeerProcess({"peer": "openvino"})
    assert peer.facts["not_run"] == f"{', '.join(missing)} not installed: {onnx_files.INSTALL}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peer", "precision"), [(p, one) for p in ("onnxruntime", "openvino") for one in PEERS[p]]
)
def test_installed_library_runs_the_network_in_its_precision(peer, precision, tmp_path):
    for name in onnx_files.PACKAGES:
        pytest.importorskip(name, reason=f"needs {onnx_files.INSTALL}")
    case = PrecisionCase("resnet50", 32, 2)
    config = case.config("fp32", {}, "", "")
    images, _ = whole_batch(config)
    np.save(tmp_path / onnx_files.IMAGES, images.contiguous().numpy())
    np.save(tmp_path / onnx_files.CALIBRATION, images.contiguous().numpy())
    task = {"peer": peer, "precision": precision, "config": plain(config), "outputs": "out.npy"}
    runner = PeerProcess({**task, "folder": str(tmp_path)})
    assert runner.facts.get("not_run") is None
    assert ran_as(precision, runner.facts["kernels"])
    assert runner.facts["peak_bytes"] > 0
    before_s = runner.cpu_s()
    runner.step()
    assert runner.cpu_s() > before_s
    runner.close()
    assert np.load(tmp_path / "out.npy").shape == (2, case.classes)


@pytest.mark.parametrize("most", [512, 4])
def test_libraries_calibrate_on_the_middle_of_one_image_at_a_time(most, tmp_path, monkeypatch):
    """A batch at 1024x1024 had every value of the network in memory, which ran out."""
    monkeypatch.setattr(onnx_files, "CALIBRATED_PIXELS", most)
    images = np.arange(3.0 * 2 * 6 * 5).reshape(3, 2, 6, 5)
    np.save(tmp_path / onnx_files.CALIBRATION, images)
    made = [*onnx_files.samples(tmp_path)]
    assert len(made) == 3
    middle = images if most == 512 else images[:, :, 1:5, :4]
    np.testing.assert_array_equal(np.concatenate(made), middle)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet50", "unet"])
@pytest.mark.parametrize("peer", ["onnxruntime", "openvino"])
def test_ranges_of_a_small_sample_serve_the_network_of_all_pixels(
    model, peer, tmp_path, monkeypatch
):
    for name in onnx_files.PACKAGES:
        pytest.importorskip(name, reason=f"needs {onnx_files.INSTALL}")
    monkeypatch.setattr(onnx_files, "CALIBRATED_PIXELS", 64)
    case = PrecisionCase(model, 128, 2)
    config = case.config("fp32", {}, "", "")
    images, _ = whole_batch(config)
    module = plain_module(config)
    set_statistics(module, images)
    weights = tmp_path / "weights.safetensors"
    save_file({name: t.contiguous() for name, t in module.state_dict().items()}, weights)
    config = case.config("fp32", {}, str(weights), "")
    np.save(tmp_path / onnx_files.IMAGES, images.contiguous().numpy())
    np.save(tmp_path / onnx_files.CALIBRATION, images.contiguous().numpy())
    file, step = {
        "onnxruntime": (onnx_files.ONNXRUNTIME_INT8, onnxruntime_step),
        "openvino": (onnx_files.OPENVINO_INT8, openvino_step),
    }[peer]
    for name in (onnx_files.NETWORK, onnx_files._SAMPLE, file):  # in this process: 64 pixels
        onnx_files.WRITERS[name](config, tmp_path)
    run, count = step(config, "int8", tmp_path)
    with torch.inference_mode():
        expected = module(images).numpy()
    assert accuracy(np.asarray(run()), expected)["signal_db"] > 3  # random weights
    assert count(run)["u8"] > 10  # without VNNI OpenVINO's transposed convolutions are in float
    assert lacks_instructions("int8") or ran_as("int8", count(run))


def test_network_has_the_classes_of_the_data():
    assert PrecisionCase("resnet50", 32, 1, "digits").classes == 10
    graph = trace_config(PrecisionCase("unet", 32, 1).config("fp32", {}, "", ""))
    assert graph.shape(graph.output) == [1, 2, 32, 32]
    [case] = cases_of(PrecisionOptions(data="digits"))
    assert "digits" in case.title


def test_aims_are_ratios_of_rounds_and_wrong_peers_do_not_count():
    rows = [row("hires", "fp32", 4, 8), row("hires", "int8", 1, 2)]
    rows += [row("hires, 2 tiles", "fp32", 2, 4)]
    rows += [row("torch", "fp32", 8, 16), row("compiled", "fp32", 1, 1, ok=False)]
    rows += [{"who": "torch", "precision": "int8", "name": "torch int8", "ok": True}]
    rows[-1] |= {"not_run": "it is not installed"}
    found = {aim.what: aim.measured for aim in aims(rows) if aim.measured is not None}
    assert found == {
        "fp32 beside torch fp32": 2.0,
        "fp32, two tiles beside one": 2.0,
        "int8 beside fp32 of hires": 4.0,
    }
    shown, judged = tables({"cases": {"net": rows}})
    assert "not run: it is not installed" in "\n".join(shown.lines(markdown=True))
    assert "WRONG: kernels of another type" in "\n".join(shown.lines(markdown=True))
    verdicts = {line["what"]: line[""] for line in judged.rows}
    assert all(verdicts[what] == "met" for what in found)
    assert {what: why for what, why in verdicts.items() if what not in found} == {
        "fp32 beside compiled fp32": "not measured: compiled fp32 is wrong: "
        "kernels of another type than fp32",
        "int8 beside torch int8": "not measured: it is not installed",
        "int8, two tiles beside one": "not measured: there is no row hires, 2 tiles int8",
    }


def test_peer_that_was_not_asked_for_has_no_aim_in_silence():
    first, *_ = aims([row("hires", "bf16", 1.0)])
    assert first.cells() == {
        "what": "bf16 beside the best peer",
        "measured": "-",
        "aim": "1.0",
        "limit": "-",
        "": "not measured: no library of --peers runs bf16",
    }


def test_limit_of_an_aim_is_what_kernels_alone_reach_in_the_same_rounds():
    # The second round is four times as slow, kernels and all, and the median of ratios unmoved.
    ours = row("hires", "fp32", 2.0, 8.0, 2.0) | {"kernels_samples_s": [1.6, 6.4, 1.6]}
    first, *_ = aims([ours, row("torch", "fp32", 1.0, 4.0, 1.2)])
    assert (first.measured, first.limit) == (0.5, 0.625)
    assert kernel_seconds(VERBOSE) == pytest.approx((1 + 0.1 + 0.1) / 1e3)


@pytest.mark.parametrize("kernels_s", [[2.1, 1.9, 2.2], [0.0, 0.0, 0.0]])
def test_limit_below_what_is_reached_is_no_number(kernels_s):
    """ResNet-101 met an aim with 1.00 whose limit was 0.94; 0 s: no kernel is oneDNN's."""
    ours = row("hires", "fp32", 2.0, 2.0, 2.0) | {"kernels_samples_s": kernels_s}
    first, *_ = aims([ours, row("torch", "fp32", 2.0, 2.0, 2.0)])
    assert (first.measured, first.limit) == (1.0, None)
    assert (first.cells()["limit"], first.cells()[""]) == ("-", "met")


def test_steps_of_hires_are_taken_apart_in_a_table():
    ours = row("hires", "fp32", 2.0) | {key: [0.5] for key in (KERNELS, CALLS, WAITS)}
    *_, shown = tables({"cases": {"net": [ours, row("torch", "fp32", 1.0)]}})
    assert shown.title == "net: parts of a step"
    assert [(line["row"], line["rest ms"]) for line in shown.rows] == [("hires fp32", "500.0")]


def test_paragraphs_of_the_notes_have_no_line_breaks():
    for paragraph in NOTES.split("\n\n"):
        assert "\n" not in paragraph
        assert "  " not in paragraph


@pytest.mark.parametrize(("took_s", "verdict"), [(0.996, "met"), (0.994, "short")])
def test_aim_is_judged_as_it_is_shown(took_s, verdict):
    rows = [row("hires", "bf16", 1.0), row("openvino", "bf16", took_s)]
    _, judged = tables({"cases": {"net": rows}})
    [line] = [line for line in judged.rows if line["what"] == "bf16 beside openvino bf16"]
    assert (line["measured"] == "1.00") == (line[""] == "met") == (verdict == "met")


def test_row_of_one_thread_that_keeps_two_cores_busy_is_wrong():
    fine = {"who": "openvino", "precision": "int8", "kernels": {"u8": 2}, "cores": 1.0}
    assert what_is_wrong(fine) == ""
    assert what_is_wrong({**fine, "cores": 1.9}) == "1.9 cores"
    assert what_is_wrong({**fine, "cores": 1.9, "who": "hires, 2 tiles"}) == ""
    assert what_is_wrong({**fine, "kernels": {"f32": 2}}) == "kernels of another type than int8"


def test_accuracy_is_agreement_of_classes_and_signal_over_error():
    expected = np.array([[1.0, 0.0], [0.0, 1.0]])
    found = accuracy(np.array([[1.0, 0.0], [2.0, 1.0]]), expected)
    assert found["agreement"] == 0.5
    assert found["signal_db"] == pytest.approx(10 * np.log10(2 / 4))
    halves = np.split(np.arange(24.0).reshape(1, 2, 3, 4), 2, axis=-1)
    assert join_parts(halves, (1, 2, 3, 4)).shape == (1, 2, 3, 4)


def test_int8_case_names_its_scales():
    config = PrecisionCase("unet", 64, 2).config("int8", {"tiles": [1, 2]}, "", "scales.json")
    assert config.quant.scales == "scales.json"
    assert config.model.name == "unet"


@pytest.mark.slow
def test_peer_that_cannot_run_answers_why():
    peer = PeerProcess({"peer": "torch"})
    assert "KeyError" in peer.facts["not_run"]


@pytest.mark.slow
def test_peer_that_is_killed_in_a_round_is_a_row_with_the_reason(tmp_path, capfd):
    config = PrecisionCase("resnet50", 32, 1).config("fp32", {}, "", "")
    np.save(tmp_path / onnx_files.IMAGES, whole_batch(config)[0].contiguous().numpy())
    task = {"peer": "torch", "precision": "fp32", "config": plain(config), "outputs": "out.npy"}
    peer = PeerProcess({**task, "folder": str(tmp_path)})
    peer.step()
    assert "not_run" not in peer.facts
    peer._process.kill()
    for _ in range(2):
        peer.step()
        assert peer.facts["not_run"].startswith("in a step: its process was killed by SIGKILL")
    assert peer.cpu_s() > 0
    peer.close()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--models", "vgg"], "--models vgg is unknown"),
        (["--precisions", "fp8"], "--precisions fp8 is unknown"),
        (["--models", "resnet50,unet", "--weights", "net.pt"], "fits one network"),
        (["--images", "big"], "must be numbers"),
        (["--data", "nowhere"], "--data nowhere is no folder"),
        (["--peers", "onnx"], "--peers onnx is unknown"),
    ],
)
def test_bad_options_are_refused(words, told, capsys):
    assert BENCHMARK.main(words) == 2
    assert told in capsys.readouterr().err


def test_precisions_that_the_cpu_emulates_stand_above_the_tables(monkeypatch):
    monkeypatch.setattr(checks, "cpu_flags", lambda: {"avx2", "avx512_bf16"})
    result = result_of({"precisions": ["fp32", "bf16", "int8"]}, {})
    assert result["lacks"] == ["int8"]
    [line] = BENCHMARK.facts(result)
    assert line.startswith("no avx512_vnni, avx_vnni, amx_int8: 8-bit products would saturate")
    assert BENCHMARK.facts({"cases": {}}) == []  # of an older result


@pytest.mark.sampled(1)
@pytest.mark.dist
@pytest.mark.parametrize("trim", [False, True])
def test_kernels_and_messages_of_tiles_are_timed_in_each_round(trim, tmp_path):
    few = {"images": (64,), "batches": (1,), "precisions": ("fp32",), "peers": (), "rounds": 2}
    options = PrecisionOptions(**few, trim=trim)
    [case] = cases_of(options)
    inputs = make_inputs(case, tmp_path, options)
    *_, (_, facts) = stream_ranks(run_case, 2, 120.0, case, options, inputs)
    alone, tile = facts["hires fp32"], facts["hires, 2 tiles fp32"]
    assert alone["calls_samples_s"] == alone["waits_samples_s"] == [0.0, 0.0]
    for seconds in (*(tile[key] for key in (KERNELS, CALLS, WAITS)), alone[KERNELS]):
        assert len(seconds) == 2
        assert min(seconds) > 0
