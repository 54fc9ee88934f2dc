"""JupyterLab as a user sees it: `make lab`, a real browser, notebook 01 run with its sliders, in light and dark."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = "01_work_the_rule_by_hand.ipynb"
FOUND = {name: shutil.which(name) for name in ("make", "chromium", "chromedriver")}
FOUND["chromium"] = FOUND["chromium"] or shutil.which("google-chrome")
MISSING = [name for name, path in FOUND.items() if not path]
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(MISSING), reason=f"not on this machine: {', '.join(MISSING)}"),
]
OPTIONS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1500,1300",
]  # fmt: skip


def until(found, seconds=90):
    """The first true value of `found()`; errors on the way are those of a page that is still loading."""
    deadline, last = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        try:
            if value := found():
                return value
        except Exception as error:
            last = error
        time.sleep(0.25)
    raise AssertionError(f"nothing after {seconds} s; last: {last}")


@pytest.fixture(params=["JupyterLab Light", "JupyterLab Dark"])
def page(request, tmp_path):
    """A browser on notebook 01 in a JupyterLab that `make lab` started; the notebook on disk stays as it is."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    settings = tmp_path / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": request.param}))
    (settings / "notification.jupyterlab-settings").write_text(json.dumps({"fetchNews": "false"}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = "--allow-root" if hasattr(os, "geteuid") and os.geteuid() == 0 else ""
    arguments = f"--no-browser --ServerApp.port={port} --ServerApp.port_retries=0 --IdentityProvider.token=test {root}"
    environment = {**os.environ, "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings")}
    before = (ROOT / "notebooks" / NOTEBOOK).read_bytes()
    log = (tmp_path / "lab.log").open("w")
    server = subprocess.Popen(
        ["make", "lab", f"ARGS={arguments}"],
        cwd=ROOT,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    options = webdriver.ChromeOptions()
    options.binary_location = FOUND["chromium"]
    for option in [*OPTIONS, f"--user-data-dir={tmp_path / 'profile'}"]:
        options.add_argument(option)
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: urllib.request.urlopen(f"{address}/api?token=test", timeout=2).status == 200)
        browser = webdriver.Chrome(options=options, service=Service(FOUND["chromedriver"]))
        try:
            browser.get(f"{address}/lab/tree/{NOTEBOOK}?token=test&reset")
            yield browser, tmp_path / f"{request.param.split()[-1].lower()}.png"
        finally:
            browser.quit()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
        log.close()
        (ROOT / "notebooks" / NOTEBOOK).write_bytes(before)


def test_notebook_01_runs_its_slider_moves_the_picture_and_nothing_is_red(page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser, picture = page

    def all_of(selector):
        return browser.find_elements(By.CSS_SELECTOR, selector)

    def last_image():
        return all_of(".jp-OutputArea-output img")[-1].get_attribute("src")

    until(lambda: all_of(".jp-Notebook .jp-CodeCell"))
    until(lambda: "Python 3 (ipykernel)" in all_of(".jp-Toolbar-kernelName")[0].text)
    until(lambda: "Idle" in browser.find_element(By.TAG_NAME, "body").text)
    browser.find_element(By.XPATH, "//div[contains(@class, 'lm-MenuBar-itemLabel') and text()='Run']").click()
    until(lambda: [item for item in all_of(".lm-Menu-item") if item.text.startswith("Run All Cells")])[0].click()
    handles = until(lambda: all_of(".noUi-handle"))
    until(lambda: not browser.find_elements(By.XPATH, "//*[contains(@class, 'jp-InputPrompt') and contains(., '*')]"))
    assert len(handles) == 6

    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", handles[0])
    until(lambda: all_of(".jupyter-widgets-output-area img, .widget-output img"))
    before = last_image()
    handles[0].send_keys(Keys.ARROW_RIGHT * 3)
    until(lambda: last_image() != before, 30)
    browser.save_screenshot(str(picture))

    for mime in ("application/vnd.jupyter.error", "application/vnd.jupyter.stderr"):
        assert not all_of(f"[data-mime-type='{mime}']")
    assert "Error displaying widget" not in browser.page_source
