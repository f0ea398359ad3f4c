"""A real Chromium, without a window, driven through the DevTools protocol over two pipes: nothing is needed but
Debian's package. See https://chromedevtools.github.io/devtools-protocol."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import psutil

from tests.support.server import PATIENCE_S

_NAMES = ("chromium", "google-chrome")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests may run as root, and it shows our own page alone
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}


class ChromiumError(Exception):
    """A command failed, or an expression threw."""


class Chromium:
    """The browser. `log` is what it wrote."""

    def __init__(self, folder: str) -> None:
        program = next(filter(None, map(shutil.which, _NAMES)), None)
        assert program is not None, "Chromium is needed: tests/install_system_packages.sh"
        theirs_in, self._write = os.pipe()
        self._read, theirs_out = os.pipe()
        command = [program, *_FLAGS, f"--user-data-dir={folder}/profile", "about:blank"]
        redirect = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        with open(f"{folder}/log", "wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", redirect, *command],
                pass_fds=(theirs_in, theirs_out),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "HOME": folder},
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._received = b""
        self._last_id = 0
        self._pages: dict[str, Page] = {}

    @contextlib.contextmanager
    def page(
        self, width: int = 1280, height: int = 800, *, dark: bool = False, phone: bool = False
    ) -> Iterator["Page"]:
        """A page in a profile of its own. A phone has fingers and a denser screen."""
        context = self.command("Target.createBrowserContext")["browserContextId"]
        try:
            target = self.command("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
            session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            page = self._pages[session] = Page(self, session)
            for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
                page.command(f"{domain}.enable")
            scale = 2 if phone else 1
            page.command(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
            )
            page.command("Emulation.setTouchEmulationEnabled", enabled=phone)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            page.command("Emulation.setEmulatedMedia", features=[scheme])
            yield page
        finally:
            self.command("Target.disposeBrowserContext", browserContextId=context)

    def command(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command. What the pages report meanwhile goes to them."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            received = self._receive()
            if received.get("id") == message["id"]:
                if "error" in received:
                    raise ChromiumError(f"{method}: {received['error']['message']}")
                return dict(received["result"])
            page = self._pages.get(received.get("sessionId", ""))
            if page is not None:
                page.take(received["method"], received["params"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            assert select.select([self._read], [], [], PATIENCE_S)[0], "Chromium does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium has ended"
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))

    def close(self) -> None:
        processes = [self._process, *psutil.Process(self._process.pid).children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(PATIENCE_S)
        psutil.wait_procs(processes[1:], timeout=5)
        os.close(self._read)
        os.close(self._write)


class Page:
    """One page. `complaints` are errors and warnings of its console, `requests` all addresses that it asked for."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.command(method, self._session, **params)

    def take(self, method: str, params: dict[str, Any]) -> None:
        """An event."""
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"]))

    def open(self, url: str) -> None:
        """Returns when the page knows what the server serves, or asks for a key."""
        self.command("Page.navigate", url=url)
        self.wait("document.querySelector('#model')?.options.length || !document.querySelector('#key-form').hidden")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, of its promise if it is one."""
        answer = self.command("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise ChromiumError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Returns once the expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(ChromiumError):  # the page may just be loading
                if self.run(f"Boolean({condition})"):
                    return
            assert time.monotonic() < deadline, f"never true: {condition}; {self.complaints}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """What somebody reads there."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the element."""
        place = self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); node.scrollIntoView();"
            "const box = node.getBoundingClientRect();"
            "return {x: box.left + box.width / 2, y: box.top + box.height / 2}; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, **place, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.command("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = _KEYS[key]
        details = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        if key == "Enter":
            details["text"] = "\r"
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, **details)

    def choose_files(self, selector: str, *paths: str) -> None:
        """As the user would in the dialog of a file input."""
        root = self.command("DOM.getDocument")["root"]["nodeId"]
        node = self.command("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.command("DOM.setFileInputFiles", nodeId=node, files=list(paths))

    def picture(self) -> bytes:
        """A screenshot as PNG."""
        return base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def run_chromium() -> Iterator[Chromium]:
    with tempfile.TemporaryDirectory(prefix="tm-chromium-", ignore_cleanup_errors=True) as folder:
        browser = Chromium(folder)
        try:
            yield browser
        finally:
            browser.close()
