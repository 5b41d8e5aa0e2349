"""A headless Chromium, driven over a pipe with its DevTools protocol: needs no other package than Python's own."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--disable-extensions", "--disable-default-apps", "--mute-audio", "--remote-debugging-pipe"),
]
# Chromium reads commands from descriptor 3 and writes answers to descriptor 4
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
PATIENCE = 120.0  # seconds

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: apt install chromium, or name one in $CHROMIUM"
)


class Browser:
    """A browser; `page` opens a tab."""

    def __init__(self, folder):
        there, commands = os.pipe()
        answers, back = os.pipe()
        # above 4, so that neither is overwritten when it becomes 3 or 4
        ends = [os.dup(end) if end < 5 else end for end in (there, back)]
        ends = [os.dup(end) if end < 5 else end for end in ends]
        command = [sys.executable, "-c", START, *map(str, ends), CHROMIUM, *FLAGS, f"--user-data-dir={folder}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=ends, **quiet)
        for end in {there, back, *ends}:
            os.close(end)
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb")
        self._number = 0
        self.events = []  # that came while an answer was awaited

    def ask(self, method, session=None, **values):
        """The answer to a command."""
        self._number += 1
        named = {"sessionId": session} if session else {}
        message = {"id": self._number, "method": method, "params": values, **named}
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self):
        content = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            content += byte
        return json.loads(content)

    @contextlib.contextmanager
    def page(self, url, width=1200, height=900, *, dark=False):
        """A tab of this size that has loaded an address."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        page.ask("Runtime.enable")
        page.ask("Log.enable")
        page.resize(width, height)
        page.ask(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        page.ask("Page.navigate", url=url)
        page.wait("document.readyState === 'complete' && location.href !== 'about:blank'")
        try:
            yield page
        finally:
            self.ask("Target.closeTarget", targetId=target)

    def close(self):
        with contextlib.suppress(AssertionError, OSError):
            self.ask("Browser.close")
        self._commands.close()
        self._answers.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Page:
    """A tab."""

    def __init__(self, browser, session):
        self._browser, self._session = browser, session

    def ask(self, method, **values):
        return self._browser.ask(method, self._session, **values)

    def resize(self, width, height):
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def run(self, script):
        """The value of an expression of JavaScript."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script):
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.run(script):
            assert time.monotonic() < deadline, f"{script} is not true: {self.run('document.body.innerText')[:2000]}"
            time.sleep(0.02)

    def press(self, *keys):
        """Press keys, as a user at a keyboard."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Escape": 27}
        for key in keys:
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            code = codes.get(key, ord(key.upper()) if len(key) == 1 else 0)
            named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
            self.ask("Input.dispatchKeyEvent", type="keyDown", **named, **({"text": text} if text else {}))
            self.ask("Input.dispatchKeyEvent", type="keyUp", **named)

    def move(self, x, y):
        """Move the pointer."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, *, whole=False):
        """The page as a PNG."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    @property
    def complaints(self):
        """Errors of scripts, and what the page's policy refused."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        return [event["params"] for event in mine if event["method"] in kinds]
