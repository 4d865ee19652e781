"""The pages in a real browser: what they show, how they are worked by keyboard, and that they fetch nothing."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sluice.cli import main
from sluice.planner.server import PlannerServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'sluice[dev]'")
sync_api.expect.set_options(timeout=30_000)
if CHROMIUM is None:
    pytest.skip("no Chromium on this machine: apt-get install chromium", allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 390, "height": 800})  # a phone
    page.problems = []
    page.asked = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: page.asked.append(request.url))
    yield page
    page.close()


@pytest.fixture
def planner() -> Iterator[str]:
    with PlannerServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


def fits(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def test_the_planner_redraws_while_a_slider_is_moved_by_keyboard(page, planner):
    page.goto(planner)
    result = page.get_by_role("status")
    sync_api.expect(result).to_contain_text("epsilon = 3 ")
    page.get_by_role("radio", name="the noise").check()
    sync_api.expect(result).not_to_contain_text("epsilon = 3 ")
    before = result.inner_text()
    slider = page.get_by_role("slider", name="Noise multiplier")
    slider.focus()
    for _ in range(30):
        page.keyboard.press("ArrowRight")
    sync_api.expect(result).not_to_have_text(before)
    assert float(result.inner_text().split()[2]) < float(before.split()[2])
    assert page.locator("#plot svg text").count() > 5
    assert "noise_multiplier=" in page.url
    assert fits(page)
    assert page.problems == []
    assert {url.split("/")[2] for url in page.asked if not url.startswith("data:")} == {planner.split("/")[2]}


def test_the_planner_says_what_is_wrong_and_recovers(page, planner):
    page.goto(planner)
    sync_api.expect(page.get_by_role("status")).to_contain_text("epsilon")
    batch = page.get_by_role("spinbutton", name="Expected batch size")
    batch.fill("70000")
    sync_api.expect(page.get_by_role("alert")).to_contain_text("batch_size=70000")
    batch.fill("512")
    sync_api.expect(page.get_by_role("alert")).to_be_hidden()
    sync_api.expect(page.get_by_role("status")).to_contain_text("epsilon")
    assert "--batch-size 512" in page.locator("#command").inner_text()


def test_a_plan_can_be_bookmarked(page, planner):
    page.goto(f"{planner}?gate=none&dataset_size=5000&batch_size=100&releases=50&delta=1e-6&noise_multiplier=2")
    sync_api.expect(page.locator("#command")).to_contain_text("--dataset-size 5000")
    assert page.locator("#command").inner_text().startswith("sluice epsilon")
    assert not page.get_by_role("slider", name="Gate threshold beta").is_visible()


def test_every_control_of_the_planner_has_a_name(page, planner):
    page.goto(planner)
    controls = page.locator("input")
    assert controls.count() == 18
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input')].filter(e => !e.labels.length && !e.getAttribute('aria-label')).length"
    )
    assert unnamed == 0


def test_a_report_is_readable_on_a_phone_and_in_print(page, tmp_path):
    run = tmp_path / "run"
    settings = "--noise-multiplier 3 --batch-size 64 --releases 4 --seed 1 --threads 1"
    with pytest.raises(SystemExit):
        main(["train", "--dataset", "digits", *settings.split(), "--run", str(run)])
    with pytest.raises(SystemExit) as stop:
        main(["report", str(run), "-o", str(tmp_path / "report.html")])
    assert not stop.value.code
    page.goto((tmp_path / "report.html").as_uri())
    assert fits(page)
    assert page.get_by_role("heading", name="Privacy report").is_visible()
    assert page.get_by_role("region", name="Comparison of the runs").is_visible()
    assert page.get_by_role("img").count() >= 2
    assert len(page.pdf()) > 10_000
    assert len(page.asked) == 1
    assert page.problems == []
