"""``hires export``: write runs as CSV files, or a trained network as ONNX."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from hires.cli.data_keys import path_of_weights, run_of_weights
from hires.cli.options import JSON, TRUST_OWNER, Parser, chosen, file_to_write, named_runs, option
from hires.cli.screen import print_notes, print_result
from hires.cli.tracing import TorchProcess
from hires.cli.verbs.list_runs import add_live_states
from hires.core.config.precision_config import INT8, PrecisionConfig
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import TaskConfig
from hires.core.errors import ConfigError
from hires.core.store import checkpoints, records, trust
from hires.core.store.network_weights import BEST, find_weights
from hires.core.units import size
from hires.launcher.status.state import select

KINDS = ("csv", "onnx", "exported")
_ENDINGS = {"onnx": ".onnx", "exported": ".pt2"}
"""Of the files of a network, by its form."""
PARSER = Parser(
    "export",
    (
        "hires export --to csv --out exported               all campaigns under results/",
        "hires export default/RUN --to onnx                 RUN.onnx; needs the extra onnx",
        "hires export default/RUN/best --to exported --out net.pt2  for torch.export.load",
    ),
    *named_runs(),
    option("--to", "FORM", f"one of {', '.join(KINDS)}", required=True),
    option(
        "--out", "DIR|FILE", "folder to write, or file of the network (unset: RUN.onnx or .pt2)"
    ),
    TRUST_OWNER,
    JSON,
    more="onnx and exported write the network of one run with its latest weights (RUN/best: of\n"
    "its best evaluation, RUN/ema: running means), in fp32 or fp64, for any number of images of\n"
    "its size, and compare its outputs with the plain module's.",
)


def main(args: Namespace) -> int:
    """Writes runs in another form; returns 0, however the runs ended."""
    [kind] = chosen("--to", args.to, KINDS)[:1]
    if kind in _ENDINGS:
        return _network(args, kind)
    if not args.out:
        raise ConfigError(f"--to {kind} writes a folder; name it, as --out exported")
    selection = select(args.names, args.results)
    if not selection.paths:
        raise ConfigError(no_runs(args.results, "export"))
    from hires.report.tables import load, write_frames  # pandas: --help does without

    frames = load(selection.paths, selection.whole_campaigns)
    add_live_states(frames.run_list)
    files = [str(file) for file in write_frames(frames, Path(args.out))]
    print_notes(frames.all_notes())
    text = f"{len(selection.paths)} runs, {len(files)} files in {args.out}"
    print_result(args.json, {"runs": len(selection.paths), "files": files}, text)
    return 0


def no_runs(results: str, verb: str) -> str:
    """Returns the answer where there is nothing to export or report."""
    return (
        f"there are no runs under {results}/ to {verb}; start one with `hires run`, or name their "
        f"folder with --results DIR"
    )


def _network(args: Namespace, form: str) -> int:
    if len(args.names) != 1:
        raise ConfigError(
            f"--to {form} writes the network of one run, not {len(args.names)}; name one"
        )
    weights = path_of_weights(args.names[0], args.results)
    config, run = _of_inference(weights)
    path = file_to_write(args.out or f"{run.name}{_ENDINGS[form]}", _ENDINGS[form])
    with TorchProcess() as process:
        facts = process.write_network(config, form, path)
    compared = "not compared with the network: pip install onnxruntime does that"
    if facts["checked_with"] is not None:
        error = f"{facts['largest_error']:.1e}"
        compared = f"its outputs in {facts['checked_with']} differ by {error} at most"
    text = f"{path}: {size(facts['bytes'])}, {compared}"
    print_result(args.json, {"network": str(path), **facts}, text)
    return 0


def _of_inference(weights: str) -> tuple[RunConfig, Path]:
    """Returns the config of one process that has the weights of a run, and the run.

    ConfigError: it has none.
    """
    run = run_of_weights(weights)
    if run is None:
        raise ConfigError(f"{weights} is not of a run; name one, as RUN or RUN/{BEST}")
    trust.refuse_untrusted(run)
    config = records.read_config(run)
    if config.precision.name == INT8:
        raise ConfigError(
            f"{run.name} computes in {INT8}, for which no program but hires has its kernels; name "
            f"the run that trained its float weights"
        )
    if Path(weights) == run and checkpoints.whole_checkpoints(run) == ([], []):
        if config.weights is None:
            raise ConfigError(
                f"{run.name} kept no weights; run it with checkpoint.at_end=always --again, or "
                f"name another run"
            )
        weights = config.weights
    # Nothing else of a run decides its network: not its data, layout, loss or evaluations.
    inference = RunConfig(
        image=config.image,
        seed=config.seed,
        model=config.model,
        weights=str(find_weights(weights).path),  # of which a damaged one is passed over
        task=TaskConfig("infer"),
        precision=PrecisionConfig("fp64" if config.precision.name == "fp64" else "fp32"),
    )
    return inference, run.resolve()
