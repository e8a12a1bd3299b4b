"""The report in a real browser: it opens without an error or a request, sorts, filters, searches, and shows a layer.

Needs Playwright and a Chromium, named by SHRINKAGE_BROWSER or found on the path; skipped without one, unless
SHRINKAGE_BROWSER_REQUIRED is set.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from synthetic import make_run
from synthetic_codes import add_codes
from synthetic_studies import add_studies

from analysis.report.html import build_report
from analysis.results import schema

sys.path.insert(0, str(Path(__file__).parents[1] / "results"))
from made_up_runs import make_runs

EVIL = '<img src=x onerror="window.hacked=1">&|'
LARGEST, BUILT_IN_S, OPEN_IN_S = 8e6, 20.0, 2.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chromium-headless-shell")
SHOWN = "#layers .tabulator-row:visible"


def absent(why: str) -> None:
    if os.environ.get("SHRINKAGE_BROWSER_REQUIRED", "0") not in ("", "0"):
        pytest.fail(f"SHRINKAGE_BROWSER_REQUIRED is set, but {why}")
    pytest.skip(why)


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("Playwright is not installed: pip install playwright")
    path = os.environ.get("SHRINKAGE_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        absent(f"no browser was found; install Chromium, or name one in SHRINKAGE_BROWSER (looked for {NAMES})")
    root = hasattr(os, "geteuid") and os.geteuid() == 0  # Chromium's sandbox refuses to start as root
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if root else [])
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A run of 24 layers with every study, a video and a third kernel with a hostile name."""
    folder = tmp_path_factory.mktemp("page")
    run = make_run(folder / "run", 24, 6, prefix=EVIL, variants=("shipped", "fixed", EVIL))
    add_studies(run)
    add_codes(run)
    frames = [Image.new("RGB", (32, 16), colour) for colour in ("red", "green", "blue")]
    frames[0].save(run / "closed_loop.webp", save_all=True, append_images=frames[1:], duration=100, loop=0)
    return build_report([run], folder / "out").index


@pytest.fixture
def opened(browser, report):
    """opened(**options) -> a page with the report; at the end there were no errors and no requests."""
    faults: list[str] = []
    contexts = []

    def open_page(path=report, **options):
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: faults.append(f"console: {said.type} {said.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("request", lambda sent: None if local(sent.url, path) else faults.append(f"request: {sent.url[:100]}"))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def local(url: str, path: Path) -> bool:
    return url == path.as_uri() or url.startswith("data:")


def layers(page):
    """The names in the table of layers, once it is built."""
    page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    page.locator("#layers").scroll_into_view_if_needed()
    page.wait_for_selector(SHOWN)
    return page.locator(f"{SHOWN} button.open").all_text_contents()


def column(page, place: int) -> list[str]:
    return page.locator(f"{SHOWN} .tabulator-cell[tabulator-field=c{place}]").all_text_contents()


def wait_for_rows(page, said: str) -> None:
    page.wait_for_function("said => document.querySelector('#layers .count').textContent === said", arg=said)


def test_opens_without_errors_requests_or_foreign_markup(opened):
    page = opened()
    assert len(layers(page)) > 10
    page.locator("#layers button.open").first.click()
    page.wait_for_selector("dialog.details[open]")
    assert page.locator("dialog.details h2").text_content().startswith(EVIL)
    assert page.locator('img[src="x"]').count() == 0
    assert page.evaluate("window.hacked") is None


def test_sorts_by_number(opened):
    page = opened()
    layers(page)
    head = page.locator("#layers .tabulator-col[tabulator-field=c4] button.sort")
    head.focus()
    page.keyboard.press("Enter")
    rising = page.evaluate("Tabulator.findTable('#layers .tabulated')[0].getData('active').map(row => row.c4)")
    assert len(rising) == 24 and rising == sorted(rising)
    assert column(page, 4)[0] == page.evaluate("Tabulator.findTable('#layers .tabulated')[0].getData('active')[0].t4")
    head.click()
    falling = page.evaluate("Tabulator.findTable('#layers .tabulated')[0].getData('active').map(row => row.c4)")
    assert falling == rising[::-1]


def test_filters_by_column_and_searches_all(opened, report):
    page = opened()
    layers(page)
    page.locator("#layers .tabulator-col[tabulator-field=c1] select").select_option("self q")
    wait_for_rows(page, "3 of 24 rows")
    assert column(page, 1) == ["self q"] * 3
    page.locator("#layers .tabulator-col[tabulator-field=c1] select").select_option("")
    wait_for_rows(page, "24 rows")
    table = schema.read_per_layer(report.parents[1] / "run" / schema.PER_LAYER)
    shipped = table.loc[table["variant"] == "shipped", "rel_mse"]
    bound = float(shipped.median())
    page.locator("#layers .tabulator-col[tabulator-field=c4] input").fill(f"> {bound!r}")
    wait_for_rows(page, f"{int((shipped > bound).sum())} of 24 rows")
    page.locator("#layers .tabulator-col[tabulator-field=c4] input").fill("")
    page.locator("#layers input.search").fill("CROSS_ATTN.V blocks.1")
    wait_for_rows(page, "1 of 24 rows")
    assert layers(page) == [f"{EVIL}blocks.1.cross_attn.v"]
    page.locator("#layers input.search").fill("nothing has this name")
    wait_for_rows(page, "0 of 24 rows")
    assert page.get_by_text("No row matches.").is_visible()


def test_percent_is_filtered_as_it_is_shown(opened, report):
    page = opened()
    layers(page)
    heads = page.locator("#layers .tabulator-col-title").all_text_contents()
    place = heads.index("shrinkage, shipped")
    table = schema.read_per_layer(report.parents[1] / "run" / schema.PER_LAYER)
    percent = 100 * table.loc[table["variant"] == "shipped", "shrinkage"]
    low, high = float(percent.quantile(0.3)), float(percent.quantile(0.6))
    page.locator(f"#layers .tabulator-col[tabulator-field=c{place}] input").fill(f"{low:.9f}..{high:.9f}")
    wait_for_rows(page, f"{int(percent.between(low, high).sum())} of 24 rows")


def test_a_layer_opens_by_keyboard_and_steps_through_the_order_shown(opened):
    page = opened()
    names = layers(page)
    page.locator("#layers button.open").nth(1).focus()
    page.keyboard.press("Enter")
    panel = page.locator("dialog.details")
    panel.wait_for()
    assert panel.locator("h2").text_content() == names[1]
    assert panel.locator("thead th.num").all_text_contents() == ["shipped", "fixed", EVIL]
    assert panel.locator(".pair:not(.codes) svg").count() == 4  # error and cosine, by step and by call
    assert panel.locator(".bars dd").count() == 9
    histograms = panel.locator(".codes svg")
    zeros = histograms.first.get_attribute("aria-label").partition("that are 0: ")[2]
    assert histograms.count() == 2 and zeros.startswith("shipped ") and "%, fixed " in zeros
    assert histograms.first.locator("rect").count() == 3 * 17
    histograms.first.focus()
    page.keyboard.press("ArrowRight")
    assert "Code 0: shipped " in panel.locator(".codes figcaption").first.text_content()
    panel.locator(".close").focus()
    page.keyboard.press("ArrowRight")
    assert panel.locator("h2").text_content() == names[2]
    curve = panel.locator(".pair svg").first
    curve.focus()
    page.keyboard.press("ArrowRight")
    assert "step 0: shipped" in panel.locator(".pair figcaption").first.text_content()
    page.keyboard.press("Escape")
    assert not panel.is_visible()


def test_a_cell_of_the_heatmap_says_its_value_and_opens_its_layer(opened):
    page = opened()
    heat = page.locator("table.heat").first
    heat.locator("button.cell").nth(0).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label.startswith("self k, block 1: ") and f"{EVIL}blocks.1.self_attn.k" in label
    assert page.locator("figure:has(table.heat) .readout").first.text_content() == label
    assert heat.locator("button.cell[tabindex='0']").count() == 1
    page.keyboard.press("Enter")
    panel = page.locator("dialog.details")
    panel.wait_for()
    assert panel.locator("h2").text_content() == f"{EVIL}blocks.1.self_attn.k"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_theme_follows_the_reader_and_switches(opened, scheme):
    page = opened(color_scheme=scheme)
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(255, 255, 255)", "rgb(20, 22, 26)"
    first, second = (light, dark) if scheme == "light" else (dark, light)
    assert page.evaluate(ground) == first
    page.locator("button.theme").click()
    assert page.evaluate(ground) == second
    layers(page)
    row = "getComputedStyle(document.querySelector('.tabulator-row')).backgroundColor"
    assert page.evaluate(row) == second


def test_the_video_can_be_stopped_and_rests_where_motion_is_unwanted(opened):
    page = opened()
    figure = page.locator("figure.animation")
    assert figure.locator("img.moving").is_visible() and not figure.locator("img.still").is_visible()
    assert figure.locator("img.moving").evaluate("image => image.naturalWidth") == 32
    figure.locator("button").click()
    assert figure.locator("img.still").is_visible() and not figure.locator("img.moving").is_visible()
    calm = opened(reduced_motion="reduce")
    assert calm.locator("figure.animation img.still").is_visible()


def test_on_a_phone_nothing_but_tables_and_figures_is_wider_than_the_screen(opened):
    page = opened(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    layers(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator("#layers button.open").first.tap()
    page.locator("dialog.details").wait_for()
    assert page.evaluate("document.querySelector('dialog.details').scrollWidth") <= 390


def test_print_has_every_layer_and_no_controls(opened):
    page = opened()
    layers(page)
    page.emulate_media(media="print")
    assert page.locator("#layers .source tbody tr:visible").count() == 24
    for hidden in (".tabulated", ".tools", "nav", "button.theme", "button.play"):
        assert page.locator(f"{hidden}:visible").count() == 0


def test_240_layers_36_calls_are_small_quick_to_build_and_quick_to_open(opened, tmp_path):
    make_runs(tmp_path / "runs", 1)
    add_codes(tmp_path / "runs" / "run-0")
    started = time.process_time()  # of this process alone: the machine may be shared
    index = build_report([tmp_path / "runs" / "run-0"], tmp_path / "out").index
    assert time.process_time() - started < BUILT_IN_S
    assert index.stat().st_size < LARGEST
    took = []
    for _ in range(3):
        page = opened(index)
        frame = "() => new Promise(done => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
        took.append(page.evaluate(frame) / 1e3)  # from the start of navigation to the first frame after loading
    assert min(took) < OPEN_IN_S, took
    assert len(layers(page)) < 240  # rows out of sight are not drawn
    assert "240 rows" in page.locator("#layers .count").text_content()
