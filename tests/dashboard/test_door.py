"""Who gets into the dashboard, and what a browser may do there."""

import asyncio
import base64
import http.client
import re
import socket
import ssl
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import expect

from penstock import __version__
from penstock.common.tokens import hash_token, new_token
from penstock.dashboard.sessions import IDLE_SECONDS_MAX, SESSIONS_MAX, SESSIONS_OF_USER_MAX, Sessions
from penstock.http.auth import Guard
from penstock.http.problems import Problem
from penstock.model.rights import EVERYBODY, by_role
from tests.certificates import make_authority
from tests.dashboard.conftest import StartBroker, Visit, axe, fits, until
from tests.http.api import Api, Reply
from tests.server.harness import ROOT, WAIT_SECONDS, BrokerProcess

TOKENS = {role: f"{role}-" + "0123456789abcdef" for role in ("read", "operate", "admin")}
SETTINGS = "\n".join(
    f'[[http.tokens]]\nname = "{role}-token"\nrole = "{role}"\ntoken = "{token}"'
    for role, token in TOKENS.items()
)
HTML = {"Accept": "text/html"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "penstock.toml").write_text(SETTINGS)
    broker = BrokerProcess(folder, "--http", "127.0.0.1:0", "--config", str(folder / "penstock.toml")).start()
    with Api(broker.ports["http"], TOKENS["admin"]) as api:
        api.send("secret-queue", b"x")
    yield broker
    broker.kill()


def ask(
    broker: BrokerProcess, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> Reply:
    with Api(broker.ports["http"]) as api:
        return api.ask(method, path, body, {**HTML, **{k.replace("_", "-"): v for k, v in headers.items()}})


def sign_in(broker: BrokerProcess, token: str, target: str = "/") -> Reply:
    form = urlencode({"token": token, "next": target}).encode()
    return ask(broker, "/sign-in", "POST", form, Content_Type="application/x-www-form-urlencoded")


def cookie_of(reply: Reply) -> str:
    return reply.headers["set-cookie"].partition(";")[0]


def test_a_file_that_is_not_there_is_no_fault(guarded: BrokerProcess) -> None:
    for path in ("/_penstock/nope", "/_penstock/", "/_penstock/../door.py"):
        assert ask(guarded, path).problem == "not-found"
    assert ask(guarded, "/_penstock/penstock.css", "POST", b"").problem == "method-not-allowed"
    assert "Traceback" not in guarded.log()


def upgrade(broker: BrokerProcess, **headers: str) -> int:
    """The status with which a websocket is answered."""
    port = broker.ports["http"]
    given = {
        "Host": f"127.0.0.1:{port}",
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(b"0" * 16).decode(),
    } | {name.replace("_", "-"): value for name, value in headers.items()}
    with socket.create_connection(("127.0.0.1", port), WAIT_SECONDS) as wire:
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        path = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
        wire.sendall(f"GET {path} HTTP/1.1\r\n{head}\r\n".encode())
        return int(wire.makefile("rb").readline().split()[1])


# --- with tokens -----------------------------------------------------------------------------------


def test_a_visitor_signs_in_and_out(guarded: BrokerProcess, visit: Visit) -> None:
    page = visit(guarded, "/?sort=-ready", forgive=["401"], alone=True)
    expect(page.get_by_role("heading", name="Penstock")).to_be_visible()
    assert "secret-queue" not in page.content()
    axe(page)
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_have_text("This token is not known here.")
    assert "secret-queue" not in page.content()
    axe(page)
    page.get_by_label("Token").fill(TOKENS["read"])
    page.get_by_role("button", name="Sign in").click()
    page.locator('tr[data-key="secret-queue"]').wait_for()
    assert page.url.endswith("/?sort=-ready")
    expect(page.get_by_text("read-token")).to_be_visible()
    assert TOKENS["read"] not in page.content()
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["expires"]) == (True, "Strict", -1)
    assert TOKENS["read"] not in cookie["value"]
    axe(page)
    # Another page of the same visitor notices, too, that they have left.
    other = visit(guarded, context=page.context)
    other.locator('tr[data-key="secret-queue"]').wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/sign-in")
    other.wait_for_url("**/sign-in?**")
    assert ask(guarded, "/", Cookie=f"{cookie['name']}={cookie['value']}").status == 303


def test_the_sign_in_page_fits_a_phone_in_the_dark(guarded: BrokerProcess, visit: Visit) -> None:
    page = visit(guarded, width=375, dark=True)
    page.get_by_label("Token").wait_for()
    axe(page)
    fits(page)


@pytest.mark.parametrize("path", ["/", "/queue/secret-queue", "/engine", "/nothing"])
def test_without_a_session_there_is_only_the_sign_in_page(guarded: BrokerProcess, path: str) -> None:
    for cookie in ("", "penstock=x", f"penstock_{guarded.ports['http']}=forged", '=;;"', "a" * 5000):
        reply = ask(guarded, path, Cookie=cookie)
        assert (reply.status, reply.body) == (303, b"")
        assert reply.headers["location"].startswith("/sign-in?next=%2F")
    with Api(guarded.ports["http"]) as api:
        for file in ("/_nicegui/x/static/nicegui.js", "/_nicegui_ws/socket.io/?EIO=4&transport=polling"):
            assert api.ask("GET", file).problem == "unauthorized"


def test_a_wrong_token_gets_no_cookie(guarded: BrokerProcess) -> None:
    for token in ("", "wrong", TOKENS["read"] + "x", TOKENS["read"].upper(), "\x00", "é"):
        reply = sign_in(guarded, token)
        assert reply.status == 401
        assert "set-cookie" not in reply.headers
        assert b"not known here" in reply.body
    assert ask(guarded, "/sign-in", "POST", b"token=" + b"x" * 20_000).problem == "body-too-large"
    assert all(token not in guarded.log() for token in TOKENS.values())


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("/queue/a%2Fb?x=1", "/queue/a%2Fb?x=1"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("https://evil.example/", "/"),
        ("javascript:alert(1)", "/"),
        ("/a\r\nSet-Cookie: x=1", "/"),
        ("", "/"),
    ],
)
def test_nobody_is_sent_elsewhere(guarded: BrokerProcess, target: str, place: str) -> None:
    reply = sign_in(guarded, TOKENS["read"], target)
    assert (reply.status, reply.headers["location"]) == (303, place)


def test_a_link_from_elsewhere_finds_the_visitor_signed_in(guarded: BrokerProcess) -> None:
    # The first request comes without the strict cookie; the page that it gets asks again, with it.
    reply = ask(guarded, "/queue/x%22y", Sec_Fetch_Site="cross-site")
    assert reply.status == 200
    assert b'content="0;url=/queue/x%22y"' in reply.body


@pytest.mark.long
def test_a_token_that_is_taken_back_closes_its_pages(
    start_broker: StartBroker, tmp_path: Path, visit: Visit
) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(SETTINGS)
    broker = start_broker("--config", str(config))
    cookie = cookie_of(sign_in(broker, TOKENS["operate"]))
    name, _, value = cookie.partition("=")
    page = visit(broker, "/sign-in", alone=True)
    page.context.add_cookies([{"name": name, "value": value, "url": page.url}])
    page.goto(page.url.replace("/sign-in", "/"))
    expect(page.get_by_role("heading", name="No queue yet")).to_be_visible()
    config.write_text(SETTINGS.replace(TOKENS["operate"], "another-0123456789"))
    broker.signal(1)
    page.wait_for_url("**/sign-in?**")
    assert ask(broker, "/", Cookie=cookie).status == 303


@pytest.mark.long
def test_a_right_that_is_taken_away_is_gone_from_open_pages(
    start_broker: StartBroker, tmp_path: Path, visit: Visit
) -> None:
    token = new_token("ann")
    ann = f'[[user]]\nname = "ann"\ntoken-hash = "{hash_token(token)}"\n'
    ann += 'rights = [{queues = %s, may = ["read"]}]\n'
    config = tmp_path / "penstock.toml"
    config.write_text(ann % '"*"' + SETTINGS)
    broker = start_broker("--config", str(config))
    with Api(broker.ports["http"], TOKENS["admin"]) as api:
        for queue in ("orders", "payroll", "bolts"):
            api.send(queue, b"x")
    name, _, value = cookie_of(sign_in(broker, token)).partition("=")
    page = visit(broker, "/sign-in", alone=True)
    page.context.add_cookies([{"name": name, "value": value, "url": page.url}])
    page.goto(page.url.replace("/sign-in", "/"))
    expect(page.get_by_role("link", name="payroll")).to_be_visible()
    for rights, is_gone in (('["orders", "bolts"]', "payroll"), ('"bolts"', "orders")):
        config.write_text(ann % rights + SETTINGS)
        broker.signal(1)
        expect(page.get_by_role("link", name=is_gone)).to_have_count(0)
        expect(page.get_by_role("link", name="bolts")).to_be_visible()


def test_a_form_that_does_not_come_is_not_waited_for(start_broker: StartBroker, tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(f"{SETTINGS}\n[limits]\nframe-seconds = 1\n")
    broker = start_broker("--config", str(config))
    with socket.create_connection(("127.0.0.1", broker.ports["http"]), WAIT_SECONDS) as peer:
        head = (
            f"POST /sign-in HTTP/1.1\r\nHost: 127.0.0.1:{broker.ports['http']}\r\nContent-Length: 9\r\n\r\n"
        )
        peer.sendall(head.encode() + b"tok")
        assert peer.makefile("rb").read().startswith(b"HTTP/1.1 408")  # and it is closed


def test_over_tls_the_cookie_is_for_tls_only(start_broker: StartBroker, tmp_path: Path) -> None:
    make_authority(tmp_path, "api")
    config = tmp_path / "penstock.toml"
    files = f'tls-certificate = "{tmp_path}/api.pem"\ntls-key = "{tmp_path}/api.key"\n'
    config.write_text(f"{SETTINGS}\n[http]\n{files}")
    broker = start_broker("--config", str(config))
    connection = http.client.HTTPSConnection(
        "127.0.0.1",
        broker.ports["http"],
        timeout=WAIT_SECONDS,
        context=ssl._create_unverified_context(),
    )
    connection.request("POST", "/sign-in", urlencode({"token": TOKENS["read"]}), HTML)
    response = connection.getresponse()
    assert response.status == 303
    assert {"HttpOnly", "SameSite=strict", "Secure"} <= set(response.headers["set-cookie"].split("; "))
    connection.close()


# --- other sites -----------------------------------------------------------------------------------


def test_a_websocket_of_another_site_is_refused(broker: BrokerProcess, guarded: BrokerProcess) -> None:
    for place, cookie in ((broker, ""), (guarded, cookie_of(sign_in(guarded, TOKENS["admin"])))):
        port = place.ports["http"]
        own = f"http://127.0.0.1:{port}"
        assert upgrade(place, Origin=own, Cookie=cookie) == 101
        strange = ("http://evil.example", "null", f"http://127.0.0.1:{port + 1}", f"{own}.evil.example", "")
        for origin in strange:
            assert upgrade(place, Origin=origin, Cookie=cookie) == 403
    assert upgrade(guarded, Origin=f"http://127.0.0.1:{guarded.ports['http']}") == 403  # nobody's cookie
    assert upgrade(broker, Host="evil.example", Origin="http://evil.example") == 403


def test_a_page_of_another_site_gets_nothing(broker: BrokerProcess, guarded: BrokerProcess) -> None:
    for place in (broker, guarded):
        assert ask(place, "/", Origin="http://evil.example").problem == "forbidden"
        assert ask(place, "/sign-in", "POST", b"token=x", Origin="http://evil.example").problem == "forbidden"
        assert ask(place, "/sign-out", "POST", b"", Origin="null").problem == "forbidden"
    assert ask(broker, "/", Host="evil.example").problem == "forbidden"


def test_a_page_tells_the_browser_what_to_refuse(broker: BrokerProcess, guarded: BrokerProcess) -> None:
    for place, path in ((broker, "/"), (broker, "/nothing"), (guarded, "/sign-in")):
        reply = ask(place, path)
        parts = reply.headers["content-security-policy"].split("; ")
        policy = dict(part.partition(" ")[::2] for part in parts)
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert "http" not in reply.headers["content-security-policy"]
        (nonce,) = re.findall("'nonce-([^']+)'", policy["script-src"])
        assert "'unsafe-inline'" not in policy["script-src"]
        scripts = re.findall(b"<script[^>]*>", reply.body)
        assert scripts
        assert all(b'nonce="%b"' % nonce.encode() in script for script in scripts)
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "same-origin"
        assert reply.headers["cache-control"] == "no-store"
        assert nonce not in ask(place, path).headers["content-security-policy"]


def test_a_script_that_got_into_a_page_would_not_run(broker: BrokerProcess, visit: Visit) -> None:
    page = visit(broker, forgive=["Content Security Policy", "Content-Security-Policy"])
    page.evaluate(
        """() => {
            const box = document.createElement("div");
            box.innerHTML = '<img src="data:," onerror="window.caught = 1">';
            document.body.append(box);
            const script = document.createElement("script");
            script.textContent = "window.caught = 2";
            document.body.append(script);
        }"""
    )
    page.wait_for_function("document.querySelector('img[onerror]').complete")
    assert page.evaluate("window.caught") is None


# --- the API beside it -------------------------------------------------------------------------------


def test_the_api_is_where_it_was(broker: BrokerProcess) -> None:
    for path in ("/v1/queues", "/metrics", "/healthz", "/readyz", "/openapi.json", "/v1/nothing"):
        reply = ask(broker, path)  # as a browser would
        assert "html" not in reply.headers["content-type"]
    with Api(broker.ports["http"]) as api:
        line = api.ask("GET", "/")
        assert line.headers["content-type"].startswith("text/plain")
        assert b"dashboard is here for browsers" in line.body
        assert api.ask("GET", "/nothing").problem == "not-found"
    assert ask(broker, "/", "HEAD").status == 200
    assert ask(broker, "/", "POST", b"").problem == "method-not-allowed"
    assert ask(broker, "/sign-in").headers["location"] == "/"  # nobody has to


def test_polling_is_not_offered(broker: BrokerProcess) -> None:
    assert ask(broker, "/_nicegui_ws/socket.io/?EIO=4&transport=polling").status == 400


def test_without_the_extra_a_line_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('nicegui', 'fastapi', 'socketio', 'websockets'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    broker = BrokerProcess(
        tmp_path, "--http", "127.0.0.1:0", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ).start()
    try:
        reply = ask(broker, "/")
        assert reply.headers["content-type"].startswith("text/plain")
        (line,) = reply.body.decode().splitlines()
        assert __version__ in line
        assert "pip install 'penstock[dashboard]'" in line
        assert ask(broker, "/sign-in").problem == "not-found"
        assert upgrade(broker, Origin=f"http://127.0.0.1:{broker.ports['http']}") in (404, 426)
        assert "Traceback" not in broker.log()
    finally:
        assert broker.stop() == 0


@pytest.mark.usefixtures("cold")
def test_nobody_pays_for_what_nobody_visits(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        assert api.ask("GET", "/").status == 200
    (second,) = Path(f"/proc/{broker.pid}/task/{broker.pid}/children").read_text().split()
    maps = Path(f"/proc/{second}/maps").read_text()
    assert "pydantic_core" not in maps  # NiceGUI's, and the first to be seen among a process's files
    assert ask(broker, "/").status == 200
    until(lambda: "pydantic_core" in Path(f"/proc/{second}/maps").read_text(), "the pages to be there")


def in_a_loop(work: Coroutine[None, None, None]) -> None:
    """In a thread: the browser has a loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


# --- sessions ----------------------------------------------------------------------------------------


def test_sessions_end() -> None:
    in_a_loop(_sessions_end())


async def _sessions_end() -> None:
    now = 0.0
    rows = [{"name": "a", "role": "read", "token": "a-token"}, {"name": "b", "role": "admin", "token": "b"}]
    guard = Guard(rows)
    sessions = Sessions(guard, lambda: now)
    with pytest.raises(Problem):
        await sessions.start("c", "here")
    first, second = await sessions.start("a-token", "here"), await sessions.start("b", "here")
    assert first != second
    found = sessions.find(first)
    assert found is not None
    assert (found.name, found.user, found.token) == ("a", by_role("a", "read"), "a-token")
    now = IDLE_SECONDS_MAX
    assert sessions.find(first) is found
    now += 1
    assert sessions.find(second) is None  # nobody has used it
    assert sessions.find(first) is found
    sessions.end(first)
    assert sessions.find(first) is None
    assert (found.token, found.user) == (None, None)
    third = await sessions.start("a-token", "here")
    guard.set_users(rows[1:], [])
    assert sessions.find(third) is None
    guard.set_users([], [])
    everybody = sessions.find(None)
    assert everybody is not None
    assert everybody.user is EVERYBODY


@pytest.mark.long
def test_one_who_signs_in_again_and_again_ends_sessions_of_its_own() -> None:
    in_a_loop(_one_who_signs_in_again_and_again_ends_sessions_of_its_own())


async def _one_who_signs_in_again_and_again_ends_sessions_of_its_own() -> None:
    guard = Guard([{"name": name, "role": "admin", "token": name} for name in map(str, range(SESSIONS_MAX))])
    sessions = Sessions(guard)
    kept, oldest = await sessions.start("0", "here"), await sessions.start("1", "here")
    for _ in range(SESSIONS_OF_USER_MAX):
        await sessions.start("1", "here")
    assert sessions.find(oldest) is None
    assert sessions.find(kept) is not None  # and so it is the youngest
    for number in range(2, SESSIONS_MAX):
        await sessions.start(str(number), "here")
        if number == SESSIONS_MAX // 2:
            assert sessions.find(kept) is not None  # It is used, and the youngest again.
    assert len(sessions) == SESSIONS_MAX


def test_an_export_takes_no_word_of_its_address_for_something_else(api: Api) -> None:
    api.send("exported", b"x")
    for name in ("method", "path", "headers", "self"):
        reply = api.ask("GET", f"/export?{name}=x")
        assert (reply.status, f"no parameter '{name}'" in reply.body.decode()) == (400, True)
    assert b'"value":"x"' in api.ask("GET", "/export?values=none&queue=exported").body
