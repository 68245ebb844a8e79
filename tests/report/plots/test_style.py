from hires.report.plots import style
from hires.report.read.measured_points import set_apart


def test_long_title_takes_more_lines_and_loses_no_letter():
    text = "default, resnet18, bf16, train, batch 4, model.classes=4"
    for inches in (style.COLUMN, style.WIDTH):
        with style.styled(inches):
            fig, axes = style.panels(2, 2, 2.0)
            before = fig.get_figheight()
            style.title(axes[0], text)
            lines = axes[0].get_title(loc="left").split("\n")
        assert " ".join(lines) == text
        assert 1 < len(lines) <= 3
        assert fig.get_figheight() > before


def test_titles_of_panels_hold_what_differs():
    names = [["resnet18", "bf16", "batch 4"], ["resnet18", "fp32", "batch 4"]]
    assert set_apart(names) == ("resnet18, batch 4", ["bf16", "fp32"])
    assert set_apart(names[:1]) == ("", ["resnet18, bf16, batch 4"])
