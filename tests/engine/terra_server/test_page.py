"""The page of Terra in a real browser: headless Chromium, by way of nginx, which knows the server's key."""

import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException, WebDriverException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from examples.server import Server
from tests.night.malformed import HEADERS
from tests.night.proxy import NGINX, Proxy

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
BROWSER_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-proxy-server",
    # a window that no one sees goes on, too
    "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding",
    "--disable-backgrounding-occluded-windows",
    "--window-size=600,860",
)
WAIT = 120

pytestmark = [
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER and NGINX), reason="needs Debian's chromium, chromium-driver, nginx-light"
    ),
    pytest.mark.timeout(600),
]


CONFIGURATION = """
server {{
    listen 127.0.0.1:{port};
    location / {{
        proxy_pass http://127.0.0.1:{server};
        proxy_http_version 1.1;
        proxy_set_header Host $http_host;
        proxy_set_header Upgrade $http_upgrade;
        proxy_set_header Connection $http_connection;
        proxy_set_header Authorization "{key}";
    }}
}}
"""


class Player:
    """A browser that shows the page."""

    def __init__(self, url: str, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in BROWSER_OPTIONS:
            options.add_argument(argument)
        options.add_argument(f"--user-data-dir={profile}")
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
        last_texts: deque[str] = deque(maxlen=20)

        def has_text(_: object) -> bool:
            last_texts.append(self.text(name))
            return expected in last_texts[-1]

        with suppress(TimeoutException):
            WebDriverWait(self.browser, WAIT, poll_frequency=0.05).until(has_text)
        assert expected in last_texts[-1], last_texts

    def drive(self, frames: int) -> None:
        """Hold one key after the other, each until so many more frames are there."""
        for key in (Keys.ARROW_UP, Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_LEFT):
            ActionChains(self.browser).key_down(key).perform()
            self.reach(self.frames + frames)
            ActionChains(self.browser).key_up(key).perform()

    def reach(self, frames: int) -> None:
        """Wait for so many frames."""

        def has_frames(_: object) -> bool:
            return self.frames >= frames

        message = f"fewer than {frames} frames: {self.text('status')}"
        WebDriverWait(self.browser, WAIT, poll_frequency=0.05).until(has_frames, message)


@pytest.fixture(scope="module")
def proxy(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """It adds the server's key."""

    def configure(port: int) -> str:
        return CONFIGURATION.format(port=port, server=server.port, key=HEADERS["authorization"])

    with Proxy(tmp_path_factory.mktemp("proxy"), configure) as proxy:
        yield proxy


@contextmanager
def playing(proxy: Proxy, folder: Path, seed: int) -> Iterator[Player]:
    player = Player(f"{proxy.url}/terra?seed={seed}", folder / str(seed))
    try:
        yield player
    finally:
        player.browser.quit()


def test_two_players_drive_and_a_lost_connection_resumes(proxy: Proxy, tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(playing(proxy, tmp_path, seed=1))
        second = stack.enter_context(playing(proxy, tmp_path, seed=2))
        first.until("frames", "1")
        second.until("frames", "1")
        first_pixels = first.pixels
        second_pixels = second.pixels
        first.drive(2)
        second.drive(2)
        assert first.pixels != first_pixels
        assert second.pixels != second_pixels
        assert first.pixels != second.pixels
        # docs/terra.md shows one like it
        assert first.browser.save_screenshot(str(tmp_path / "terra-page.png"))
        # its console is silent: nothing failed, and nothing was asked of anybody else
        assert not first.browser.get_log("browser")

        proxy.stop()
        first.until("status", "connection lost")
        frames_before = first.frames
        proxy.start()
        first.until("status", "driving")
        first.drive(1)
        assert first.frames >= frames_before + 4


def test_the_page_loads_nothing_from_elsewhere(proxy: Proxy, tmp_path: Path) -> None:
    with playing(proxy, tmp_path, 3) as player:
        player.until("frames", "1")
        script = "return performance.getEntriesByType('resource').map(entry => entry.name)"
        for url in player.browser.execute_script(script):
            assert url.startswith((proxy.url, "data:"))
