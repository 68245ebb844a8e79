"""Is every operation drawn that was measured at enough sizes, each way with a line of its own?"""

from __future__ import annotations

from hires.report.comm_curves import curves, draw


def row(operation, num_bytes, ranks=2, **p50_s):
    ways = {way.replace("_", ":"): {"p50_s": value} for way, value in p50_s.items()}
    facts = {"operation": operation, "bytes": num_bytes, "dtype": "float32", "blocking": True}
    return {**facts, "ranks": ranks, "ways": {**ways, "cma": {"missing": "no such call"}}}


def test_operations_of_three_sizes_have_a_figure(tmp_path):
    rows = [row("all_reduce", 4 << i, mpi=1e-6 * 2**i, raw_c=1e-6) for i in range(8)]
    rows += [row("barrier", 4, mpi=1e-6)]
    assert draw(rows, tmp_path) == ["all_reduce"]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["comm-all_reduce.png", "comm-all_reduce.svg"]


def test_each_number_of_ranks_has_a_panel_and_each_way_a_line():
    rows = [row("reduce", 4 << i, n, mpi=1e-6, raw_c=1e-6) for i in range(3) for n in (2, 4)]
    figure = curves("reduce", rows)
    assert [len(axis.lines) for axis in figure.axes] == [2, 2]
    solid, dashed = figure.axes[0].lines
    assert (solid.get_label(), solid.get_linestyle()) == ("mpi", "-")
    assert (dashed.get_label(), dashed.get_linestyle()) == ("raw:c", "--")
    assert solid.get_color() != dashed.get_color()


def test_ways_of_one_library_share_its_colour_and_differ_all_the_same():
    names = {"mpi": 1e-6, "mpi_direct": 1e-6, "raw_mpi4py": 1e-6}
    figure = curves("reduce", [row("reduce", 4 << i, **names) for i in range(3)])
    lines = figure.axes[0].lines
    assert len({line.get_color() for line in lines}) == 1
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == 3


def test_axes_are_logarithmic():
    figure = curves("reduce", [row("reduce", 4 << i, mpi=1e-6) for i in range(3)])
    assert figure.axes[0].get_xscale() == figure.axes[0].get_yscale() == "log"
