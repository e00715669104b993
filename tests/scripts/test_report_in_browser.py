"""The report's page in a real browser: what it shows, that mouse and keys work, and that nothing gets out of it."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from eval.report import find_run_dirs, read_runs
from eval.report_page import render, write_page
from tests.browser import start_browser
from tests.report_runs import png, write_evaluation, write_needles, write_report_run

pytestmark = pytest.mark.browser

SCRIPT = "</script><script>document.title = 'owned'</script>"
PICTURE = "<img src=x onerror=\"document.title = 'owned'\">"
HOSTILE = f"{PICTURE} \"'><b class=owned>&amp; {{{{ 7 * 7 }}}} {SCRIPT}"
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = start_browser(playwright)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of RoPE, one of them unfinished, one with everything, and one full of markup."""
    folder = tmp_path_factory.mktemp("browser")
    for seed, (loss, steps) in enumerate([(2.0, 40), (2.25, 40), (1.0, 20)]):
        write_report_run(folder / f"rope-seed{seed}", {32: loss, 64: 2 * loss}, "position=rope", seed=seed, steps=steps)
    whole = write_report_run(folder / "si", {32: 1.5, 64: 1.75}, "position=scale_invariant_p_rope")
    write_evaluation(whole, {32: 1.5, 128: 1.875})
    write_needles(whole, {32: 0.75, 64: 0.5})
    (whole / "attention_total.png").write_bytes(png())
    settings = {"data": {"name": HOSTILE, "dir": HOSTILE}, "device": HOSTILE}
    hostile = write_report_run(folder / "<b class=owned>&amp;'\"", {32: 3.0, 64: 3.5}, "position=alibi", **settings)
    for name in ("samples.txt", "log.txt", "eval.json"):
        (hostile / name).write_text(HOSTILE)
    (hostile / "attention.json").write_text(f'["{PICTURE}"]'.replace('"document', "'document").replace("'\">", "''>"))
    write_needles(hostile, {32: 0.5})
    (hostile / "needle.json").write_text(
        (hostile / "needle.json").read_text().replace(str(hostile), SCRIPT.replace("'", ""))
    )
    path = folder / "pages" / "report.html"
    runs = read_runs(path for path in find_run_dirs([f"{folder}/*"]) if path.name != "pages")
    write_page(path, render(runs, f"Title {HOSTILE}", {"command": HOSTILE}))
    return path


@pytest.fixture
def show(browser: Browser, page_path: Path) -> Iterator[Open]:
    """show(width=..., dark=..., scripts=...): the open page. Fails when it says or fetches anything."""
    said: list[str] = []
    contexts = []

    def show(width: int = 1400, dark: bool = False, scripts: bool = True, path: Path = page_path) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            java_script_enabled=scripts,
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: said.append(request.url) if not request.url.startswith("data:") else None)
        page.goto(path.as_uri())
        assert said == [path.as_uri()]
        said.clear()
        return page

    yield show
    for context in contexts:
        context.close()
    assert said == []


def column(page: Page, heading: str) -> list[str]:
    """The texts of a column of the table of the runs."""
    table = page.locator("#summary table").nth(1)
    headings = [text.strip().replace("\N{NO-BREAK SPACE}", " ") for text in table.locator("thead th").all_inner_texts()]
    index = headings.index(heading) + 1
    return table.locator(f"tbody tr > :nth-child({index})").all_inner_texts()


def sort(page: Page, heading: str) -> None:
    name = re.compile(heading.replace(" ", r"\s"))
    page.locator("#summary table").nth(1).get_by_role("button", name=name).click()


def curves(page: Page, chart: str = "validation-32") -> list[str | None]:
    """The runs that a chart draws."""
    paths = page.locator(f"[data-chart={chart}] path.curve")
    return [path.get_attribute("data-run") for path in paths.all()]


def test_what_runs_say_is_shown_as_text_and_does_nothing(show: Open):
    page = show()
    assert page.title() == f"Title {HOSTILE}"
    expect(page.locator("h1")).to_have_text(f"Title {HOSTILE}")
    assert page.locator("script").count() == 2
    assert page.locator(".owned, img[src=x]").count() == 0
    expect(page.locator("#texts pre")).to_contain_text(HOSTILE)
    expect(page.locator("#configs")).to_contain_text(SCRIPT)
    expect(page.locator("#environment")).to_contain_text(SCRIPT)
    assert "<b class=owned>&amp;'\"" in curves(page)


def test_the_policy_alone_would_stop_a_script(page_path: Path, tmp_path: Path, browser: Browser):
    page = browser.new_page()
    (tmp_path / "a.html").write_text(page_path.read_text().replace("<main>", f"<main>{SCRIPT}{PICTURE}"))
    page.goto((tmp_path / "a.html").as_uri())
    assert page.title() != "owned"
    assert page.locator("main > img[src=x]").count() == 1
    page.close()


def test_every_table_and_chart_has_its_data(show: Open):
    page = show()
    assert column(page, "Loss at 32") == ["3.000", "2.000", "2.250", "(1.000)", "1.500"]
    assert page.locator("#summary strong").all_inner_texts() == ["1.500", "1.750", "0.750"] * 2
    assert curves(page)[1:] == ["rope-seed0", "rope-seed1", "rope-seed2", "si"]
    assert curves(page, "position-128") == ["si"]
    for figure in page.locator("figure.chart").all():
        for path in figure.locator("path.curve").all():
            assert re.fullmatch(r"M(-?\d+\.\d,-?\d+\.\d)(L-?\d+\.\d,-?\d+\.\d)*", path.get_attribute("d") or "")
    assert page.locator("#needles table").count() == 2
    assert page.locator("#attention img").evaluate("image => image.naturalWidth") == 3


def test_a_heading_sorts_and_what_has_no_value_comes_last(show: Open):
    page = show()
    sort(page, "Loss at 32")
    assert column(page, "Loss at 32") == ["(1.000)", "1.500", "2.000", "2.250", "3.000"]
    sort(page, "Loss at 32")
    assert column(page, "Loss at 32") == ["3.000", "2.250", "2.000", "1.500", "(1.000)"]
    assert page.locator("#summary [aria-sort=descending]").count() == 1
    for order in ("ascending", "descending"):
        sort(page, "Needles at 64")
        assert column(page, "Needles at 64") == ["0.500", "–", "–", "–", "–"]
        assert page.locator(f"#summary [aria-sort={order}]").inner_text().startswith("Needles")
    sort(page, "Run")
    assert column(page, "Run")[1:] == ["rope-seed0", "rope-seed1", "rope-seed2", "si"]


def test_runs_can_be_left_out_of_all_charts(show: Open):
    page = show()
    rope = page.get_by_role("group", name="RoPE", exact=True)
    rope.get_by_label("rope-seed1").uncheck()
    assert curves(page)[1:] == ["rope-seed0", "rope-seed2", "si"]
    assert curves(page, "training")[1:] == ["rope-seed0", "rope-seed2", "si"]
    whole = rope.get_by_label("RoPE", exact=True)
    assert whole.evaluate("box => box.indeterminate")
    whole.check()
    assert len(curves(page)) == 5
    whole.uncheck()
    assert curves(page)[1:] == ["si"]
    page.get_by_role("button", name="none").click()
    assert curves(page) == []
    expect(page.locator("[data-chart=training] .above")).to_have_text("No run is chosen.")
    page.get_by_role("button", name="all", exact=True).click()
    assert len(curves(page)) == 5


def test_pointing_at_a_chart_shows_the_values_there(show: Open):
    page = show()
    svg = page.locator("[data-chart=validation-64] > svg")
    box = svg.bounding_box()
    assert box is not None
    svg.hover(position={"x": box["width"] - 15, "y": box["height"] - 45})
    lines = [line.split("\n") for line in page.locator("[data-chart=validation-64] .tip > *").all_inner_texts()]
    assert lines == [
        ["training step 40"],
        ["si", "1.75"],
        ["<b class=owned>&amp;'\"", "3.5"],
        ["rope-seed0", "4"],
        ["rope-seed1", "4.5"],
    ]
    assert page.locator("[data-chart=validation-64] .now").inner_text().startswith("si")
    page.locator("h1").hover()
    expect(page.locator("[data-chart=validation-64] .tip")).to_be_hidden()


def test_the_arrow_keys_read_a_chart(show: Open):
    page = show()
    page.locator("[data-chart=length] > svg").focus()
    tip = page.locator("[data-chart=length] .tip")
    for key, x in (("ArrowRight", "32"), ("ArrowRight", "64"), ("ArrowRight", "128"), ("ArrowLeft", "64")):
        page.keyboard.press(key)
        expect(tip.locator("b")).to_have_text(f"evaluation length (tokens) {x}")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_a_curve_far_above_is_named_and_shown_on_request(show: Open):
    page = show()
    figure = page.locator("[data-chart=validation-64]")
    for name in ("RoPE", "ALiBi"):
        assert name in page.locator(".choices").inner_text()

    def highest() -> float:
        """The label of the highest line across."""
        return max(float(text) for text in figure.locator(".axis text[text-anchor=end]").all_text_contents())

    before = highest()
    figure.get_by_label("whole range").check()
    assert highest() > before
    assert highest() >= 8


def luminance(page: Page, selector: str, what: str) -> float:
    found = page.locator(selector).first.evaluate(f"node => getComputedStyle(node).{what}")
    linear = [(int(part) / 255) ** 2.2 for part in re.findall(r"\d+", found)[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_is_readable_in_light_and_dark(show: Open, dark: bool):
    page = show(dark=dark)
    ground = luminance(page, "body", "backgroundColor")
    assert (ground < 0.05) == dark
    for selector in ("h1", "td", "caption", "a", "td strong", ".note", ".problems li"):
        low, high = sorted([ground, luminance(page, selector, "color")])
        assert (high + 0.05) / (low + 0.05) > 4.5, selector
    for cell in page.locator("#needles td[style]").all():
        styles = cell.evaluate("node => [getComputedStyle(node).color, getComputedStyle(node).backgroundColor]")
        assert styles[0] in ("rgb(0, 0, 0)", "rgb(255, 255, 255)")


@pytest.mark.parametrize("width", [320, 390, 800, 1400])
def test_no_width_makes_the_page_scroll_sideways(show: Open, width: int):
    page = show(width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for figure in page.locator("figure.chart").all():
        box = figure.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= width


def test_without_scripts_the_tables_are_there(show: Open):
    page = show(scripts=False)
    assert "The charts need JavaScript" in page.locator("noscript").inner_text()
    assert column(page, "Loss at 32")[1:] == ["2.000", "2.250", "(1.000)", "1.500"]


def test_it_can_be_printed(show: Open):
    page = show(dark=True)
    page.emulate_media(media="print")
    expect(page.locator("nav")).to_be_hidden()
    assert luminance(page, "body", "backgroundColor") == pytest.approx(1)
    assert page.pdf().startswith(b"%PDF")


def test_readers_of_the_screen_get_names(show: Open):
    page = show()
    assert page.locator("table:not(:has(caption))").count() == 0
    assert page.locator("th:not([scope])").count() == 0
    assert page.locator("img:not([alt])").count() == 0
    assert page.locator("svg[role=img]:not([aria-label])").count() == 0
    levels = [int(tag[1]) for tag in page.locator("h1, h2, h3").evaluate_all("nodes => nodes.map(n => n.tagName)")]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = page.locator("nav a").evaluate_all("links => links.map(link => link.getAttribute('href').slice(1))")
    assert all(page.locator(f"section[id='{name}']").count() == 1 for name in ids)
