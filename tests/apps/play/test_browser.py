"""The page of `tandemrl play` in a real browser: `make browser-check`. CHROMIUM names one that is not in PATH."""

import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
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
from tandemrl.rollout.torch_engine import TorchEngine

pytestmark = pytest.mark.browser

HOSTILE = "<script>document.title = 'taken'</script>"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    senior, junior, chat = prepared(qwen3()), prepared(small_qwen3()), tokenizer()
    chat.chat_template = CHAT_TEMPLATE
    duo = Duo(TorchEngine(senior, junior, chat), junior, chat, longest=400)
    app = application(duo, about={"senior": "big", "junior": HOSTILE, "prompt": "a b"})
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    # The seed that the page begins with: of a text that does not end by itself.
    long = next(seed for seed in range(100) if duo.write(Draft("a b", seed), 80).stop is None)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/?seed={long}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium: set CHROMIUM to its path")
    with sync_playwright() as p:
        yield p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    context = browser.new_context(accept_downloads=True)
    page = context.new_page()
    page.complaints = []
    page.on("console", lambda line: page.complaints.append(line.text) if line.type == "error" else None)
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.goto(address)
    page.wait_for_selector("#start:enabled")
    yield page
    assert page.complaints == []
    context.close()


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
    expect(page.locator("#status")).to_contain_text(re.compile("no room|ended"), timeout=60_000)
    assert len({count for count in counts if count}) > 3  # not all at once
    written = [token for answer in answers for token in answer["tokens"]]
    assert [span["text"] for span in spans(page)] == [token["text"] for token in written]
    assert [span["kind"] for span in spans(page)] == [("junior", "senior")[token["author"]] for token in written]
    colours = page.evaluate(
        "['senior', 'junior'].map(c => getComputedStyle(document.querySelector('#text .' + c)).backgroundColor)"
    )
    assert len(set(colours)) == 2
    # The same seed again gives the same text.
    before = spans(page)
    page.click("#start")
    expect(page.locator("#text span")).to_have_count(len(before), timeout=60_000)
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
    expect(page.locator("#status")).to_contain_text(re.compile("no room|ended"), timeout=60_000)
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
    assert shared.title() == "Written together"
    assert HOSTILE in shared.inner_text("body")
    assert shared.evaluate("document.scripts.length") == 0
    assert "http" not in saved.read_text().replace("http-equiv", "")
    assert page.title() == "tandemrl play"


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_scrolls_sideways(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button')]"
        ".filter(e => !(e.labels?.length || e.textContent.trim())).length"
    )
    assert unnamed == 0
