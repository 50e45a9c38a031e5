"""What a first visit costs: everything that a browser without anything in its cache is sent."""

from playwright.sync_api import Browser, Response, expect

from tests.dashboard.conftest import BROWSER_SECONDS, new_profile
from tests.http.api import Api
from tests.server.harness import BrokerProcess

FIRST_LOAD_BYTES_MAX = 400_000


def test_the_first_load_is_light(broker: BrokerProcess, api: Api, browser: Browser) -> None:
    """Heads and bodies, as they come over the wire. NiceGUI's files are most of it, and stay in the cache."""
    api.send("light", b"x")
    profile = new_profile(browser)
    page = profile.new_page()
    answers: list[Response] = []
    page.on("response", lambda it: answers.append(it))  # Playwright writes on what it calls
    try:
        page.goto(f"http://127.0.0.1:{broker.ports['http']}/", timeout=BROWSER_SECONDS * 1000)
        expect(page.locator(".ps-live-table tbody tr")).to_have_count(1)
        page.wait_for_load_state("networkidle")
        sizes = {}
        for answer in answers:
            told = answer.request.sizes()
            sizes[answer.url] = told["responseHeadersSize"] + told["responseBodySize"]
        kept = [it.url for it in answers if "immutable" in (it.header_value("cache-control") or "")]
    finally:
        profile.close()
    assert len(sizes) > 10
    assert sum(sizes.values()) <= FIRST_LOAD_BYTES_MAX, sizes
    # The second visit loads little: what is large is not even asked for again.
    again = {url: size for url, size in sizes.items() if url not in kept}
    assert sum(again.values()) <= FIRST_LOAD_BYTES_MAX / 10, again
