"""The playground in a real browser: every path a person can take, by mouse and by keyboard, wide, narrow and dark."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from onepass.edge import page as playground
from tests.support.http_client import FakeDecider, FakePending, get, serve
from tests.support.live import ROOT, Server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCREENSHOTS = ROOT / ".screenshots"  # not in git; each run writes them anew
PATIENCE_MS = 60_000  # on a busy machine; nothing waits this long otherwise
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cfc000000301010018dd8db00000000049454e44ae426082"
)
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # which chromium's sandbox refuses to be
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield found
        found.close()


Open = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens the page, waits until it knows the server, and holds it to an empty console."""
    complaints: list[str] = []
    contexts = []

    def open_(url: str, *, is_ready: bool = True, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce", **options})
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
        page.goto(url)
        if is_ready:
            expect(page.locator(".served.ready")).to_be_visible()
        return page

    yield open_
    for context in contexts:
        context.close()
    # A refused request is a line in the console, written by the browser itself
    assert [text for text in complaints if not text.startswith("Failed to load resource")] == []


def take(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


def ask(page: Page) -> None:
    page.locator("#send").click()
    expect(page.locator("#send")).to_have_text(re.compile("Ask"))


def problems(page: Page) -> list[str]:
    return [text for text in page.locator(".problem:visible").all_inner_texts() if text]


def snippet(page: Page, tab: str) -> str:
    page.locator(f"#tab-{tab}").click()
    return page.locator("#snippet").text_content() or ""


# What the server sends


def test_the_page_runs_nothing_but_itself_and_calls_nobody_else() -> None:
    with serve() as running:
        response = running.ask(get("/"))
        again = running.ask(get("/", method="HEAD"))
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert again.headers["content-length"] == str(len(response.body))
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    text = response.body.decode()
    assert set(re.findall(r"https?://[\w.]+", text)) == {"http://www.w3.org"}  # a name, in the icon
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|Storage", text)
    assert not re.search(r"\bon\w+=|style=|javascript:", text)


def test_the_page_is_not_served_under_a_foreign_name() -> None:
    with serve() as running:
        for host, status in (("evil.example", 400), ("127.0.0.1:8017", 200), ("localhost", 200), ("gpu-box", 200)):
            response = running.ask(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert response.status == status
    with serve(allowed_origins="https://ask.example") as running:
        assert running.ask(b"GET / HTTP/1.1\r\nHost: ask.example\r\n\r\n").status == 200


def test_the_page_is_read_once() -> None:
    assert playground.load() is playground.load()


# Asking


@in_a_browser
@pytest.mark.parametrize("number", range(3))
def test_an_example_is_answered(open_page: Open, live: Server, number: int) -> None:
    page = open_page(live.url)
    page.locator(".examples button").nth(number).click()
    ask(page)
    answers = page.locator(".answer")
    assert answers.count() == page.locator(".question").count() >= 2
    for place in range(answers.count()):
        answer = answers.nth(place)
        shown = [float(text.removesuffix(" %")) for text in answer.locator(".value").all_inner_texts()]
        assert sum(shown) == pytest.approx(100, abs=0.1 * len(shown))
        widths = answer.locator(".bars .fill").evaluate_all("fills => fills.map(fill => parseFloat(fill.style.width))")
        assert widths == pytest.approx(shown, abs=0.06)
        best = answer.locator(".best .value").inner_text()
        assert float(best.removesuffix(" %")) == max(shown)
        assert answer.locator("h3").inner_text() == page.locator(".question .id").nth(place).input_value()
    assert problems(page) == []
    take(page, f"example-{number}")


@in_a_browser
def test_the_figures_are_those_of_the_answer(open_page: Open, live: Server) -> None:
    page = open_page(live.url)
    with page.expect_response("**/v1/systemone") as caught:
        ask(page)
    document, headers = caught.value.json(), caught.value.headers
    totals = dict(
        zip(page.locator(".totals dt").all_inner_texts(), page.locator(".totals dd").all_inner_texts(), strict=True)
    )
    assert totals["tokens read"] == str(document["usage"]["input_tokens"])
    assert totals["request"] == headers["x-typesafe-request-id"]
    assert totals["model"] == document["model"]
    times = dict(re.findall(r"(\w+);dur=([\d.]+)", headers["server-timing"]))
    legend = dict(line.split(" ")[:2] for line in page.locator(".legend li").all_inner_texts())
    assert list(legend) == [*list(times)[:-1], "other"]
    assert float(legend["model"]) == pytest.approx(float(times["model"]), rel=0.06)
    team = page.locator(".answer").nth(1)
    assert team.locator(".verdict").inner_text() == document["answers"]["team"]["choice"]
    assert team.locator("output").inner_text() == f"{document['answers']['team']['confidence']:.2f}"
    assert json.loads(snippet(page, "answer")) == document


@in_a_browser
@pytest.mark.parametrize("number", range(3))
def test_the_code_gives_the_same_answers(
    open_page: Open, live: Server, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    page = open_page(live.url)
    page.locator(".examples button").nth(number).click()
    page.locator(".instructions").first.fill("""It's "odd": $HOME `pwd` \\n – isn't it?""")
    page.locator("#encoding").select_option("per_question")
    ask(page)
    wanted = json.loads(snippet(page, "answer"))["answers"]
    given = subprocess.run(
        ["bash", "-c", snippet(page, "curl")], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(given.stdout)["answers"].keys() == wanted.keys()
    assert str(json.loads(given.stdout)["answers"])[:40] == str(wanted)[:40]
    exec(compile(snippet(page, "python"), "snippet", "exec"), {})
    printed = capsys.readouterr().out
    for question, answer in wanted.items():
        line = next(line for line in printed.splitlines() if line.startswith(question))
        if answer["type"] == "choice":
            assert f"choice='{answer['choice']}'" in line


@in_a_browser
def test_copying_puts_the_code_on_the_clipboard(open_page: Open, live: Server) -> None:
    page = open_page(live.url, permissions=["clipboard-read", "clipboard-write"])
    code = snippet(page, "python")
    page.locator("#copy").click()
    expect(page.locator("#copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == code


NASTY = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


@in_a_browser
def test_names_come_back_in_order_and_as_text(open_page: Open, live: Server) -> None:
    page = open_page(live.url)
    page.locator("#state").fill(NASTY)
    for button in page.locator(".question .remove").all()[::-1]:
        button.click()
    page.locator("[data-add=choice]").click()
    card = page.locator(".question")
    card.locator(".id").fill(NASTY)
    card.locator(".instructions").fill(NASTY)
    names = ["10", "2", "__proto__", "constructor", "ü 🎈", NASTY]
    for place, name in enumerate(names):
        if place >= 2:
            card.locator(".more").click()
        card.locator(".option .label").nth(place).fill(name)
        card.locator(".option .description").nth(place).fill(NASTY if place % 2 else "")
    ask(page)
    assert page.locator(".answer .name").all_inner_texts() == names
    assert page.locator(".answer h3").inner_text() == NASTY
    probabilities = json.loads(snippet(page, "answer"))["answers"][NASTY]["probabilities"]
    assert sorted(probabilities) == sorted(names)
    assert page.evaluate("window.hacked") is None
    assert page.locator("#result img").count() == 0
    take(page, "nasty")


@in_a_browser
def test_it_works_by_keyboard_alone(open_page: Open, live: Server) -> None:
    page = open_page(live.url)
    page.locator("#state").focus()
    keys = page.keyboard
    keys.press("Control+a")
    keys.type("The box was open.")
    while not page.evaluate("document.activeElement.dataset.add === 'score'"):
        keys.press("Tab")
    keys.press("Enter")
    keys.type("How bad is it?")
    keys.press("Tab")
    for level in ("Fine", "Bad", "Terrible"):
        keys.type(level)
        keys.press("Enter")
    keys.type("Beyond words")
    keys.press("Control+Enter")
    expect(page.locator(".answer")).to_have_count(4)
    levels = page.locator(".answer").last.locator(".name").all_inner_texts()
    assert [re.sub(r"^\d\s*", "", level) for level in levels] == ["Fine", "Bad", "Terrible", "Beyond words"]
    page.locator("#tab-curl").focus()
    keys.press("ArrowRight")
    assert page.locator("#tab-python").get_attribute("aria-selected") == "true"
    assert "from typesafe_sdk import" in (page.locator("#snippet").text_content() or "")


@in_a_browser
def test_every_control_has_a_name_and_a_visible_focus(open_page: Open, live: Server) -> None:
    page = open_page(live.url)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, select, textarea, button")].filter((control) => control.offsetParent
            && !control.getAttribute("aria-label") && !(control.labels && control.labels.length)
            && !control.textContent.trim()).map((control) => control.outerHTML)"""
    )
    assert nameless == []
    page.locator("#state").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


# Mistakes


def only_question(page: Page, kind: str) -> Any:
    for button in page.locator(".question .remove").all()[::-1]:
        button.click()
    page.locator(f"[data-add={kind}]").click()
    return page.locator(".question")


@in_a_browser
def test_an_error_stands_at_the_field_it_names(open_page: Open, live: Server) -> None:
    page = open_page(live.url)
    card = only_question(page, "noul")
    ask(page)
    assert problems(page) == ["a noul needs instructions, or criteria with a description of true or false"]
    assert page.locator(".instructions").get_attribute("aria-invalid") == "true"
    assert page.evaluate("document.activeElement.className") == "instructions"
    described = page.locator(".instructions").get_attribute("aria-describedby")
    assert page.locator(f"#{described}").is_visible()
    assert "req_" in page.locator("#banner").inner_text()
    take(page, "error")
    card.locator(".instructions").fill("Is it so?")
    assert problems(page) == []
    ask(page)
    assert page.locator(".answer").count() == 1
    assert page.locator("#banner").is_hidden()

    only_question(page, "choice").locator(".instructions").fill("Which?")
    ask(page)
    (text,) = problems(page)
    assert "1 to 255 labels" in text
    assert page.locator(".options").get_attribute("aria-invalid") == "true"

    card = only_question(page, "score")
    for button in card.locator(".drop-option").all()[::-1]:
        button.click()
    ask(page)
    (text,) = problems(page)
    assert "1 to 10 levels" in text

    for button in page.locator(".question .remove").all():
        button.click()
    ask(page)
    assert problems(page) == ["must be an object of 1 to 512 questions by id, not 0"]


@in_a_browser
def test_what_would_be_lost_on_the_way_is_told_before(open_page: Open, live: Server) -> None:
    page = open_page(live.url)
    page.locator("input[value=json]").check(force=True)
    ask(page)
    assert problems(page)[0].startswith("This is not JSON")
    assert "Not yet" in snippet(page, "curl")
    page.locator("input[value=text]").check(force=True)
    page.locator(".question .id").nth(1).fill("refund")
    page.locator(".choice .label").nth(1).fill("billing")
    ask(page)
    assert problems(page) == ["Another option has this label", "Another question has this id"] or problems(page) == [
        "Another question has this id",
        "Another option has this label",
    ]


@in_a_browser
def test_a_json_state_that_is_no_text_is_refused_at_the_state(open_page: Open, live: Server) -> None:
    page = open_page(live.url)
    page.locator("input[value=json]").check(force=True)
    page.locator("#state").fill("17")
    ask(page)
    assert problems(page) == ["must be a string, an object or an array"]
    page.locator("#state").fill("[17]")
    ask(page)
    assert page.locator(".answer").count() == 3


@in_a_browser
def test_a_state_too_long_is_refused_at_the_state(open_page: Open, live: Server) -> None:
    page = open_page(live.url)
    page.locator("#state").fill("word " * 20_000)
    ask(page)
    (text,) = problems(page)
    assert "token" in text
    assert page.locator("#state").get_attribute("aria-invalid") == "true"


@in_a_browser
def test_the_key_is_asked_for_and_kept_nowhere(open_page: Open, locked: Server) -> None:
    page = open_page(locked.url)
    ask(page)
    assert "API key is missing" in problems(page)[0]
    assert page.evaluate("document.activeElement.id") == "key"
    page.locator("#key").fill("sesame")
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).to_have_count(3)
    for tab in ("curl", "python"):
        code = snippet(page, tab)
        assert "sesame" not in code
        assert "ONEPASS_API_KEY" in code
    kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
    assert "sesame" not in page.evaluate(kept)
    page.reload()
    assert page.locator("#key").input_value() == ""


# States of the server


def answer_kindly(decider: FakeDecider) -> None:
    """Makes the fake answer every noul with 0.75, and show pictures."""
    asked: list[Any] = []
    decider.asked = asked  # type: ignore[attr-defined]
    original = decider.answer

    def answer(pending: FakePending) -> Any:
        request = json.loads(pending.body)
        asked.append(request)
        answers = {id_: {"type": "noul", "noul": 0.75} for id_ in request["questions"]}
        usage = {"input_tokens": 9, "output_tokens": 0, "image_tokens": 4}
        found = original(pending)
        found.body = json.dumps({"model": "fake", "answers": answers, "usage": usage, "x_latency_ms": 1}).encode()
        return found

    decider.answer = answer  # type: ignore[method-assign]
    decider.has_images = True


@in_a_browser
def test_pictures_are_sent_and_named(open_page: Open, tmp_path: Path) -> None:
    pictures = [tmp_path / "my photo.png", tmp_path / "my photo.gif"]
    for picture in pictures:
        picture.write_bytes(PNG)
    (tmp_path / "notes.txt").write_text("hello")
    with serve(answer_kindly) as running:
        url = f"http://127.0.0.1:{running.http.server_port}/"
        page = open_page(url)
        only_question(page, "noul").locator(".instructions").fill("Is there a cat?")
        page.locator("#state").fill("Look:")
        page.locator("#files").set_input_files([*pictures, tmp_path / "notes.txt"])
        expect(page.locator(".thumbs li")).to_have_count(2)
        assert problems(page) == ["notes.txt is no PNG, JPEG, WebP or GIF"]
        assert page.locator(".thumbs img").evaluate_all("all => all.every((image) => image.naturalWidth === 1)")
        assert page.locator("#state").input_value() == "Look:\n<image:my-photo>\n<image:my-photo-2>"
        ask(page)
        (request,) = running.decider.asked  # type: ignore[attr-defined]
        assert request["state"] == "Look:\n<image:my-photo>\n<image:my-photo-2>"
        assert list(request["images"]) == ["my-photo", "my-photo-2"]
        assert page.locator(".totals").inner_text().count("picture tokens") == 1
        take(page, "pictures")
        curl = snippet(page, "curl")
        ran = subprocess.run(["bash", "-c", curl], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(ran.stdout)["model"] == "fake"
        assert running.decider.asked[1] == request  # type: ignore[attr-defined]
        code = snippet(page, "python")
        assert '"<image:my-photo>": Image(Path("my photo.png"))' in code
        compile(code, "snippet", "exec")
        page.get_by_label("Remove my-photo", exact=True).click()
        page.get_by_label("Remove my-photo-2").click()
        assert page.locator("#state").input_value() == "Look:"
        dropped = page.evaluate_handle(
            """(text) => { const transfer = new DataTransfer();
            transfer.items.add(new File([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], "a.png", {type: "image/png"}));
            return transfer; }""",
            base64.b64encode(PNG).decode(),
        )
        page.dispatch_event("body", "drop", {"dataTransfer": dropped})
        expect(page.locator(".thumbs li")).to_have_count(1)


@in_a_browser
def test_pictures_are_offered_where_they_are_taken(open_page: Open, live: Server) -> None:
    expect(open_page(live.url).locator("#pictures")).to_be_visible()
    with Server("--no-images") as server:
        assert open_page(server.url).locator("#pictures").is_hidden()


@in_a_browser
def test_it_says_that_the_model_loads_and_when_it_is_there(open_page: Open) -> None:
    with serve(answer_kindly, is_loaded=False) as running:
        page = open_page(f"http://127.0.0.1:{running.http.server_port}/", is_ready=False)
        expect(page.locator(".served.waiting")).to_be_visible()
        ask(page)
        assert "loading" in page.locator("#banner").inner_text()
        assert "Try again in 3 s" in page.locator("#banner").inner_text()
        running.decider.ready.set()
        expect(page.locator(".served.ready")).to_be_visible()


@in_a_browser
def test_a_question_can_be_taken_back(open_page: Open) -> None:
    with serve(answer_kindly) as running:
        page = open_page(f"http://127.0.0.1:{running.http.server_port}/")
        only_question(page, "noul")
        running.decider.gate.clear()
        page.locator("#send").click()
        expect(page.locator("#send")).to_have_text(re.compile("Stop"))
        assert running.decider.told.get(timeout=10)
        page.locator("#send").click()
        expect(page.locator("#banner")).to_have_text(re.compile("taken back"))
        running.decider.gate.set()
        ask(page)
        assert page.locator(".answer").count() == 1


@in_a_browser
def test_it_says_when_the_server_is_gone(open_page: Open, live: Server) -> None:
    page = open_page(live.url)
    page.route("**/*", lambda route: route.abort())
    page.locator("#send").click()
    expect(page.locator("#banner")).to_have_text(re.compile("No answer came"))
    expect(page.locator(".served.down")).to_be_visible()
    page.unroute("**/*")
    expect(page.locator(".served.ready")).to_be_visible()


# Looks


@in_a_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_runs_over_on_a_phone(open_page: Open, live: Server, scheme: str) -> None:
    page = open_page(
        live.url, viewport=PHONE, is_mobile=True, has_touch=True, device_scale_factor=2, color_scheme=scheme
    )
    for step in ("form", "answers"):
        if step == "answers":
            page.locator("#state").fill("w" * 300)
            ask(page)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= PHONE["width"]
        take(page, f"phone-{scheme}-{step}")
    small = page.evaluate(
        """() => [...document.querySelectorAll("button, select, input")].filter((control) => control.offsetParent
            && control.getBoundingClientRect().height && control.getBoundingClientRect().height < 24
            && !control.matches("[type=radio], [type=file]")).length"""
    )
    assert small == 0  # to touch


def luminance(color: str) -> float:
    """WCAG 2, of a colour as `getComputedStyle` writes it."""
    parts = [float(part) / 255 for part in re.findall(r"[\d.]+", color)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@in_a_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(open_page: Open, live: Server, scheme: str) -> None:
    page = open_page(live.url, color_scheme=scheme)
    only_question(page, "noul")
    ask(page)
    page.locator(".instructions").fill("Is it so?")
    ask(page)
    background = page.locator(".card").first.evaluate("(element) => getComputedStyle(element).backgroundColor")
    assert (luminance(background) < 0.2) == (scheme == "dark")
    for selector in (".served", ".hint", ".asked", ".verdict", ".value", ".legend", ".totals dt", "#snippet", "nav a"):
        color = page.locator(selector).first.evaluate("(element) => getComputedStyle(element).color")
        dark, light = sorted((luminance(color), luminance(background)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (selector, color)
    take(page, scheme)
