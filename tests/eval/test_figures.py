"""Figures, by what is drawn on them."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from eval.figures import STYLES, loss_by_length, loss_by_position, loss_curves, position_curves, save_figure
from eval.loss import PositionLoss
from eval.tables import Numbers, Row, Table

FINAL = {"rope": [1.12, 1.30], "alibi": [1.26, 1.25], "scale_invariant_p_rope": [1.12, 1.11], "nope": [1.25, 9.0]}
LENGTHS = [256, 1024]
STEPS = [0, 10, 20, 30, 40]


def table(finals: dict[str, list], seeds: int = 1) -> Table:
    rows = {row: Row(row.upper(), [[loss + 0.01 * seed for loss in losses] for seed in range(seeds)])
            for row, losses in finals.items()}  # fmt: skip
    return Table("tiny", "Tiny", LENGTHS, [256], rows, "a setting", "make", None)


def falling(finals: dict[str, list]) -> pd.DataFrame:
    """Curves that fall from 5 to the final loss."""
    return pd.DataFrame(
        {"row": row, "seed": 0, "step": step, "length": length, "loss": loss + (5 - loss) * 0.1 ** (step / 20)}
        for row, losses in finals.items()
        for length, loss in zip(LENGTHS, losses, strict=True)
        for step in STEPS
    )


def test_loss_curves_have_one_panel_a_length_and_one_curve_a_scheme():
    figure = loss_curves(falling(FINAL), table(FINAL))
    assert ["256 tokens" in figure.axes[0].get_title(), "1,024 tokens" in figure.axes[1].get_title()] == [True, True]
    for panel in figure.axes:
        assert [line.get_label() for line in panel.lines] == [row.upper() for row in FINAL]
        assert np.asarray(panel.lines[0].get_xdata()).tolist() == STEPS
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [row.upper() for row in FINAL]


def test_a_scheme_far_above_leaves_its_panel_and_is_named_in_its_title():
    _, panel = loss_curves(falling(FINAL), table(FINAL)).axes
    low, high = panel.get_ylim()
    assert low < 1.11 < 1.30 < high < 9
    assert "NOPE at 8.96" in panel.get_title()


def test_curves_are_the_mean_over_seeds():
    curves = pd.concat([falling(FINAL), falling(FINAL).assign(seed=1, loss=3.0)])
    panel = loss_curves(curves, table(FINAL)).axes[0]
    alone = falling({"rope": FINAL["rope"]}).query("length == 256")["loss"]
    np.testing.assert_allclose(np.asarray(panel.lines[0].get_ydata()), (alone + 3.0) / 2)


def test_loss_by_length_is_a_log2_chart_with_the_training_length_marked():
    figure = loss_by_length(table(FINAL))
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    figure.canvas.draw()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["256\n(training length)", "1,024"]
    assert [container.get_label() for container in axes.containers] == [row.upper() for row in FINAL]


def test_error_bars_appear_with_several_seeds_only():
    assert not any(bars.has_yerr for bars in error_bars(loss_by_length(table(FINAL))))
    assert all(bars.has_yerr for bars in error_bars(loss_by_length(table(FINAL, seeds=2))))


def error_bars(figure: Figure) -> list[ErrorbarContainer]:
    return [container for container in figure.axes[0].containers if isinstance(container, ErrorbarContainer)]


def test_a_scheme_looks_the_same_in_every_figure_and_different_from_every_other():
    curves = loss_curves(falling(FINAL), table(FINAL)).axes[0].lines
    lines = [bars.lines[0] for bars in error_bars(loss_by_length(table(FINAL)))]
    for curve, line in zip(curves, lines, strict=True):
        assert (curve.get_color(), curve.get_marker()) == (line.get_color(), line.get_marker())
    assert len({(color, line) for color, _, line in STYLES.values()}) == len(STYLES)
    assert len({marker for _, marker, _ in STYLES.values()}) == len(STYLES)


def test_the_rows_of_an_ablation_get_colours_of_their_own():
    rows = {f"scale_invariant_p_rope-tau_{tau}": [1.1, 1.2] for tau in (1, 10, 100)}
    assert len({str(line.get_color()) for line in loss_curves(falling(rows), table(rows)).axes[0].lines}) == 3


@pytest.mark.parametrize("names", [[f"Some scheme, tau = {t}" for t in (0.01, 1.0, 100.0)], ["A", "B" * 60, "C" * 60]])
def test_a_legend_fits_into_its_figure_and_has_what_all_names_begin_with_as_its_title(names: list[str]):
    rows = {f"row{n}": Row(name, [[1.1, 1.2]]) for n, name in enumerate(names)}
    figure = loss_by_length(Table("tiny", "Tiny", LENGTHS, [256], rows, "a setting", "make", None))
    (legend,) = figure.legends
    figure.canvas.draw()
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    same = all(name.startswith("Some scheme, ") for name in names)
    assert legend.get_title().get_text() == ("Some scheme" if same else "")
    assert [text.get_text() for text in legend.get_texts()] == [name.removeprefix("Some scheme, ") for name in names]


def test_what_ends_above_is_named_in_short_lines():
    far = {
        row: [1.1, 9.0 if row.startswith("far") else 1.1] for row in ("a", "b", "c", "d", "e", "far1", "far2", "far3")
    }
    title = loss_curves(falling(far), table(far)).axes[1].get_title()
    assert "FAR3 at " in title
    assert max(map(len, title.splitlines())) <= 40


def by_position(finals: dict[str, list], seed: int = 0) -> pd.DataFrame:
    """Losses that fall from 3 to the final one over four ranges of positions."""
    return pd.DataFrame(
        {"row": row, "seed": seed, "length": length, "start": start, "end": end, "loss": loss + (3 - loss) * share}
        for row, losses in finals.items()
        for length, loss in zip(LENGTHS, losses, strict=True)
        for start, end, share in [(0, 1, 1.0), (1, 2, 0.5), (2, 4, 0.2), (4, length, 0.0)]
    )


def test_loss_by_position_has_one_panel_a_length_and_one_curve_a_scheme_over_tokens_of_context():
    figure = loss_by_position(by_position(FINAL), table(FINAL))
    assert ["256 tokens" in figure.axes[0].get_title(), "1,024 tokens" in figure.axes[1].get_title()] == [True, True]
    for panel, length in zip(figure.axes, LENGTHS, strict=True):
        curves = [line for line in panel.lines if str(line.get_label()).isupper()]
        assert [line.get_label() for line in curves] == [row.upper() for row in FINAL]
        # contexts of 1, 2, 3 to 4, and 5 to `length` tokens
        np.testing.assert_allclose(np.asarray(curves[0].get_xdata()), [1, 2, 12**0.5, (5 * length) ** 0.5])
        assert panel.get_xscale() == "log"
        (mark,) = (line for line in panel.lines if line not in curves)
        assert np.asarray(mark.get_xdata()).tolist() == [256, 256]  # the training length
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [row.upper() for row in FINAL]


def test_curves_by_position_are_the_mean_over_seeds_and_leave_missing_runs_out():
    losses = pd.concat([by_position({"rope": [1.0, 2.0]}), by_position({"rope": [1.4, 2.0]}, seed=1)])
    panel = loss_by_position(losses, table(FINAL)).axes[0]
    (curve,) = (line for line in panel.lines if str(line.get_label()).isupper())
    assert np.asarray(curve.get_ydata())[-1] == pytest.approx(1.2)


def test_the_picture_of_one_run_has_a_curve_a_length():
    measured = {
        8: PositionLoss([0, 1, 2, 4, 8], [3, 2, 1.5, 1], [1, 1, 2, 4]),
        2: PositionLoss([0, 1, 2], [3, 2], [4, 4]),
    }
    (axes,) = position_curves(measured, 4, "rope-seed0").axes
    assert [np.asarray(line.get_ydata()).tolist() for line in axes.lines[:2]] == [[3, 2], [3, 2, 1.5, 1]]
    assert axes.get_title() == "rope-seed0, by evaluation length"


@pytest.mark.parametrize("missing", ["rope", "all"])
def test_missing_runs_leave_the_others_drawn(missing, tmp_path):
    gone = FINAL if missing == "all" else [missing]
    finals: dict[str, Numbers] = {row: [None, None] if row in gone else [*losses] for row, losses in FINAL.items()}
    rows = {row: Row(row.upper(), [losses]) for row, losses in finals.items()}
    partial = Table("tiny", "Tiny", LENGTHS, [256], rows, "a setting", "make", None)
    curves = falling({row: losses for row, losses in FINAL.items() if None not in finals[row]})
    curves = curves if len(curves) else pd.DataFrame(columns=["row", "seed", "step", "length", "loss"])
    figure = loss_curves(curves, partial)
    assert len(figure.axes[0].lines) == (0 if missing == "all" else 3)
    save_figure(figure, tmp_path / "curves")
    save_figure(loss_by_length(partial), tmp_path / "by_length")
    there = by_position({row: losses for row, losses in FINAL.items() if None not in finals[row]})
    there = there if len(there) else pd.DataFrame(columns=["row", "seed", "length", "start", "end", "loss"])
    save_figure(loss_by_position(there, partial), tmp_path / "by_position")


def test_a_figure_is_saved_as_png_and_pdf_and_nothing_else_is_left(tmp_path):
    paths = save_figure(loss_by_length(table(FINAL)), tmp_path / "new" / "by_length")
    assert [path.name for path in paths] == ["by_length.png", "by_length.pdf"]
    assert sorted((tmp_path / "new").iterdir()) == sorted(paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert paths[1].read_bytes().startswith(b"%PDF")
    assert all(path.stat().st_size > 5000 for path in paths)
