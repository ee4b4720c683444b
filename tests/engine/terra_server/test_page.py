"""The page of Terra in a real browser: headless Chromium, by way of a proxy that knows the server's key."""

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException, WebDriverException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from mmkit.serve.process import Server
from tests.night.malformed import HEADERS

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--no-proxy-server",
    # a window that no one sees goes on, too
    "--disable-background-timer-throttling", "--disable-renderer-backgrounding",
    "--disable-backgrounding-occluded-windows",
)  # fmt: skip
WAIT = 120

pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="Debian's packages chromium and chromium-driver are missing"),
    pytest.mark.timeout(600),
]


class Proxy:
    """A reverse proxy on this machine that adds the server's key, and whose connections can be cut."""

    def __init__(self, port: int) -> None:
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._is_up = True
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()
        return f"http://{host}:{port}"

    @contextmanager
    def down(self) -> Iterator[None]:
        """All connections end, as when a network fails, and there are no new ones."""
        self._is_up = False
        self._cut()
        try:
            yield
        finally:
            self._is_up = True

    def _cut(self) -> None:
        for end in list(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self._cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if not self._is_up:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._server))
                self._open |= {client, server}
                threading.Thread(target=self._up, args=(client, server), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        """One request per connection: another one on it would come without the key."""
        with suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head and (data := client.recv(2**16)):
                head += data
            request, _, rest = head.partition(b"\r\n")
            added = f"Authorization: {HEADERS['authorization']}\r\n"
            if b"upgrade: websocket" not in rest.lower():
                rest = rest.replace(b"Connection: keep-alive\r\n", b"")
                added += "Connection: close\r\n"
            server.sendall(request + b"\r\n" + added.encode() + rest)
        self._pump(client, server)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                sink.sendall(data)
        for end in (source, sink):
            self._open.discard(end)
            # closing alone tells the other side nothing while another thread waits for it
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Player:
    """A browser that shows the page."""

    def __init__(self, url: str, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in (*QUIET, f"--user-data-dir={profile}", "--window-size=600,860"):
            options.add_argument(argument)
        try:
            self.browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        except WebDriverException as error:
            pytest.skip(f"Chromium does not start on this machine: {error.msg}")
        self.browser.set_page_load_timeout(WAIT)
        self.browser.get(url)

    def text(self, name: str) -> str:
        return self.browser.find_element("id", name).text

    @property
    def frames(self) -> int:
        return int(self.text("frames"))

    @property
    def pixels(self) -> str:
        return self.browser.execute_script("return document.getElementById('view').toDataURL()")

    def until(self, name: str, expected: str) -> None:
        """Wait for a text in an element."""
        texts: list[str] = []

        def shown(_: object) -> bool:
            texts[:] = [*texts[-20:], self.text(name)]
            return expected in texts[-1]

        with suppress(TimeoutException):
            WebDriverWait(self.browser, WAIT, poll_frequency=0.05).until(shown)
        assert expected in texts[-1], texts

    def drive(self, frames: int) -> None:
        """Hold one key after the other, each until so many more frames are there."""
        for key in (Keys.ARROW_UP, Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_LEFT):
            ActionChains(self.browser).key_down(key).perform()
            self.reach(self.frames + frames)
            ActionChains(self.browser).key_up(key).perform()

    def reach(self, frames: int) -> None:
        """Wait for so many frames."""
        until = WebDriverWait(self.browser, WAIT, poll_frequency=0.05)
        until.until(lambda _: self.frames >= frames, f"fewer than {frames} frames: {self.text('status')}")


@pytest.fixture(scope="module")
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


@contextmanager
def playing(proxy: Proxy, folder: Path, seed: int) -> Iterator[Player]:
    player = Player(f"{proxy.url}/terra?seed={seed}", folder / str(seed))
    try:
        yield player
    finally:
        player.browser.quit()


def test_two_players_drive_and_a_lost_connection_resumes(
    server: Server, proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(playing(proxy, tmp_path, seed)) for seed in (1, 2))
        for player in (first, second):
            player.until("frames", "1")
        before = first.pixels, second.pixels
        first.drive(2)
        second.drive(2)
        assert first.pixels != before[0]
        assert second.pixels != before[1]
        assert first.pixels != second.pixels
        with capsys.disabled():
            print(
                "\n"
                + ", ".join(f"{player.text('rate')} frames/s, {player.text('latency')}" for player in (first, second))
            )
        # docs/terra.md shows one like it
        assert first.browser.save_screenshot(str(tmp_path / "terra-page.png"))
        # its console is silent: nothing failed, and nothing was asked of anybody else
        assert not first.browser.get_log("browser")

        with proxy.down():
            first.until("status", "connection lost")
            known = first.frames
        first.until("status", "driving")
        first.drive(1)
        assert first.frames >= known + 4


def test_the_page_loads_nothing_from_elsewhere(server: Server, proxy: Proxy, tmp_path: Path) -> None:
    with playing(proxy, tmp_path, 3) as player:
        player.until("frames", "1")
        asked = "return performance.getEntriesByType('resource').map(entry => entry.name)"
        assert all(name.startswith((proxy.url, "data:")) for name in player.browser.execute_script(asked))
