"""The page of `tandemrl play` in a real browser: `make browser-check`. CHROMIUM names one that is not in PATH."""

import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="needs playwright: make browser-check")
pytest.importorskip("uvicorn", reason="needs the play extra")
import uvicorn
from playwright.sync_api import expect, sync_playwright

from helpers import CHAT_TEMPLATE, prepared, qwen3, small_qwen3, tokenizer
from tandemrl.apps.play.app import application
from tandemrl.apps.play.duo import Draft, Duo
from tandemrl.apps.play.problems import EXAMPLE, MAX_NEW, Problems, known_problems
from tandemrl.config import SelectionConfig, load
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.tasks.generated.synthetic import uses_jargon

pytestmark = pytest.mark.browser

HOSTILE = "<script>document.title = 'taken'</script>"


@contextmanager
def served(duo: Duo, problems: Problems, **about: str) -> Iterator[str]:
    app = application(duo, problems, about=about)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    senior, junior, chat = prepared(qwen3()), prepared(small_qwen3()), tokenizer()
    chat.chat_template = CHAT_TEMPLATE
    duo = Duo(TorchEngine(senior, junior, chat), junior, chat, longest=64)
    # The seed that the page begins with: of a text that does not end by itself.
    long = next(seed for seed in range(100) if duo.write(Draft("a b", seed), 50).stop is None)
    problems = Problems(load(), [replace(EXAMPLE, messages=({"role": "user", "content": "a b"},))])
    with served(duo, problems, senior="big", junior=HOSTILE) as url:
        yield f"{url}/?seed={long}"


@pytest.fixture(scope="module")
def pair_address(pair: Path, solver: Duo) -> Iterator[str]:
    """The page of the tiny pair that comes with the library, as the command makes it."""
    problems = Problems(*known_problems(str(pair / "senior")))
    with served(solver, problems, senior="senior", junior="junior") as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium: set CHROMIUM to its path")
    with sync_playwright() as p:
        yield p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[[str], Any]]:
    """Opens an address, and sees that the page complains of nothing but what ``page.expected`` matches."""
    context = browser.new_context(accept_downloads=True)
    page = context.new_page()
    page.complaints, page.expected = [], "never"
    page.on("console", lambda line: page.complaints.append(line.text) if line.type == "error" else None)
    page.on("pageerror", lambda error: page.complaints.append(str(error)))

    def open_page(url: str) -> Any:
        page.goto(url)
        page.wait_for_selector("#start:enabled")
        assert page.get_attribute("#more", "open") is None  # the settings are folded, below the text
        page.click("#more summary")
        return page

    yield open_page
    assert [said for said in page.complaints if not re.search(page.expected, said)] == []
    context.close()


@pytest.fixture
def page(opened: Callable[[str], Any], address: str) -> Any:
    return opened(address)


@pytest.fixture
def pair_page(opened: Callable[[str], Any], pair_address: str) -> Any:
    return opened(pair_address)


def spans(page: Any) -> list[dict[str, str]]:
    return page.eval_on_selector_all(
        "#text span", "all => all.map(s => ({kind: s.className.split(' ')[0], text: s.textContent}))"
    )


def test_a_text_arrives_bit_by_bit_in_the_colours_of_its_authors(page: Any) -> None:
    counts, answers = [], []
    page.on("response", lambda r: answers.append(r.json()) if r.url.endswith("/write") else None)
    page.expose_function("grew", lambda count: counts.append(count))
    page.evaluate(
        "new MutationObserver(() => grew(document.getElementById('text').children.length))"
        ".observe(document.getElementById('text'), {childList: true})"
    )
    page.click("#start")
    expect(page.locator("#status")).to_contain_text(re.compile("no room|ended"), timeout=120_000)
    assert len({count for count in counts if count}) > 3  # not all at once
    written = [token for answer in answers for token in answer["tokens"]]
    seen = [token for token in written if token["text"] or token["special"]]
    assert [span["text"] for span in spans(page)] == [t["text"] + ("▪" if t["special"] else "") for t in seen]
    assert [span["kind"] for span in spans(page)] == [("junior", "senior")[token["author"]] for token in seen]
    colours = page.evaluate(
        "['senior', 'junior'].map(c => getComputedStyle(document.querySelector('#text .' + c)).backgroundColor)"
    )
    assert len(set(colours)) == 2
    # The same seed again gives the same text.
    before = spans(page)
    page.click("#start")
    expect(page.locator("#text span")).to_have_count(len(before), timeout=120_000)
    assert spans(page) == before


def test_a_person_takes_over_and_hands_back(page: Any) -> None:
    page.click("#start")
    page.wait_for_selector("#text span")
    page.click("#pause")
    page.wait_for_selector("#resume:enabled")
    count = len(spans(page))
    page.fill("#typed", "mine")
    page.press("#typed", "Enter")
    page.wait_for_selector("#text .person")
    assert "".join(span["text"] for span in spans(page)[count:]) == "mine"
    assert {span["kind"] for span in spans(page)[count:]} == {"person"}
    page.click("#resume")
    page.wait_for_selector(f"#text span:nth-child({count + 6})")


def test_texts_are_never_markup_and_the_keyboard_reaches_the_words(page: Any, tmp_path: Path) -> None:
    assert page.title() == "tandemrl play"
    assert HOSTILE in page.inner_text("#junior-name")
    page.fill("#prompt", HOSTILE)
    page.click("#start")
    expect(page.locator("#status")).to_contain_text(re.compile("no room|ended"), timeout=120_000)
    page.focus("#text")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert re.search(r"by the (senior|junior): \d+\.\d\d nats", page.inner_text("#surprisal"))
    with page.expect_download() as download:
        page.click("#share")
    saved = tmp_path / "shared.html"
    download.value.save_as(saved)
    shared = page.context.new_page()
    shared.goto(saved.as_uri())
    assert shared.title() == "Generated together"
    assert HOSTILE in shared.inner_text("body")
    assert shared.evaluate("document.scripts.length") == 0
    assert "http" not in saved.read_text().replace("http-equiv", "")
    assert page.title() == "tandemrl play"


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_scrolls_sideways(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    heights = page.evaluate("[...document.querySelectorAll('button, input, select')].map(e => e.offsetHeight)")
    assert min(height for height in heights if height) >= 44  # 0: hidden
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button')]"
        ".filter(e => !(e.labels?.length || e.textContent.trim())).length"
    )
    assert unnamed == 0


def finished(page: Any) -> None:
    """Wait until nothing is generated any more."""
    expect(page.locator("#status")).to_contain_text(re.compile("no room|ended|stopped"), timeout=120_000)
    page.wait_for_selector("#start:enabled")


def test_a_text_is_marked(pair_page: Any, pair: Path, solver: Duo) -> None:
    page, asked = pair_page, pair_page.input_value("#prompt")
    answer = next(
        row.ground_truth for row in known_problems(str(pair / "senior"))[1] if row.messages[0]["content"] == asked
    )
    texts = {seed: "".join(t.text for t in solver.write(Draft(asked, seed), MAX_NEW).tokens) for seed in range(40)}
    solved = {seed: f"boxed{{{answer}}}" in text for seed, text in texts.items()}
    page.fill("#seed", str(next(seed for seed in solved if solved[seed])))
    page.click("#start")
    finished(page)
    assert page.inner_text("#verdict") == f"✓ Correct: {answer}"
    page.set_viewport_size({"width": 390, "height": 844})  # of a telephone: the result is on its first screen
    page.evaluate("scrollTo(0, 0)")
    ends = "['verdict', 'text', 'more'].map(id => document.getElementById(id).getBoundingClientRect().bottom)"
    assert page.evaluate(ends) == sorted(page.evaluate(ends))
    assert page.evaluate(ends)[1] < 844
    page.fill("#seed", str(next(seed for seed in solved if not solved[seed])))
    page.click("#start")
    finished(page)
    assert re.fullmatch(rf"✗ Incorrect: found \d+, expected {answer}", page.inner_text("#verdict"))
    page.fill("#prompt", f"{asked} Well?")  # its answer is not known
    page.click("#start")
    finished(page)
    assert page.inner_text("#verdict") == ""
    page.click("#another")
    assert page.input_value("#prompt") == asked
    page.click("#another")
    assert re.search(r"\d.*How many", page.input_value("#prompt").replace(asked, ""))


def test_the_words_are_coloured_by_what_handing_over_does(pair_page: Any, solver: Duo) -> None:
    page, asked, alone = pair_page, pair_page.input_value("#prompt"), SelectionConfig("solo")
    page.set_viewport_size({"width": 390, "height": 844})
    texts = {
        seed: "".join(t.text for t in solver.write(Draft(asked, seed, alone), MAX_NEW).tokens) for seed in range(9)
    }
    page.fill("#seed", str(next(seed for seed, text in texts.items() if uses_jargon(text))))
    page.select_option("#strategy", "solo")
    page.click("#start")
    finished(page)
    assert not page.is_visible("#heat")
    with page.expect_response("**/handovers", timeout=120_000) as answer:
        page.click("#handovers")
    page.wait_for_selector("#heat:not([hidden])")
    places, whole = answer.value.json()["places"], [span["text"] for span in spans(page)]
    bare = page.eval_on_selector_all("#effects span", "all => all.map(s => [s.textContent, s.title, s.className])")
    sure = [place for place in places[1:] if place["high"] < 0 or place["low"] > 0]
    assert len(bare) == len(whole) == page.locator("#surprises span").count()
    assert len([text for text, _, _ in bare if re.search(r"[−+]\d\.\d\d", text)]) == len(sure) > 0
    assert {title for _, title, _ in bare if title} == {
        "{} [{}, {}]".format(*(f"{each[name]:+.2f}".replace("-", "−") for name in ("effect", "low", "high")))
        for each in places[1:]
    }
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    if (folder := os.environ.get("SCREENSHOTS")) is not None:
        page.screenshot(path=f"{folder}/heat.png", full_page=True)
    page.click("#start")
    finished(page)
    assert not page.is_visible("#heat")  # it is of the text before


def test_a_reload_loses_nothing(pair_page: Any) -> None:
    page = pair_page
    page.click("#start")
    finished(page)
    whole = spans(page)
    page.fill("#max_tokens", "5")
    page.click("#start")
    finished(page)
    page.select_option("#first", "junior")
    page.fill("#prompt", "another <b>prompt</b>")
    page.fill("#typed", "half a sentence")

    def state() -> list[Any]:
        fields = ("#prompt", "#first", "#max_tokens", "#seed", "#typed")
        return [spans(page), page.inner_text("#status"), *map(page.input_value, fields)]

    before = state()
    page.reload()
    page.wait_for_selector("#resume:enabled")
    assert state() == before
    page.click("#more summary")
    page.fill("#max_tokens", "100")
    page.click("#resume")  # the text of its own prompt and settings
    expect(page.locator("#status")).to_contain_text("ended", timeout=120_000)
    page.wait_for_selector("#start:enabled")
    assert spans(page) == whole
    page.reload()
    page.wait_for_selector("#start:enabled")
    assert re.match("✓ Correct|✗ Incorrect", page.inner_text("#verdict"))
    assert not page.is_enabled("#resume")
