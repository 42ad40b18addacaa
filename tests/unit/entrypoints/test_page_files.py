"""The files of the page of runs: what was taken from others, what is packaged, and the page as one file."""

import base64
import hashlib
import json
import re
import zlib

from rollgrad.entrypoints.ui.inline import STATIC, inline_page

VENDOR = STATIC / "vendor"


def test_vendored_files_are_those_of_the_packages_and_have_their_licences() -> None:
    packages = json.loads((VENDOR / "vendored.json").read_text())
    known = {"vendored.json"}
    for package in packages:
        licence = (VENDOR / package["licence_file"]).read_text()
        assert (
            "Apache License" in licence
            if package["licence"] == "Apache-2.0"
            else "Permission is hereby granted" in licence
        )
        known.add(package["licence_file"])
        for name, file in package["files"].items():
            assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == file["sha256"], name
            known.add(name)
    assert {path.name for path in VENDOR.iterdir()} == known


def test_the_served_page_has_neither_script_nor_style_of_its_own() -> None:
    page = (STATIC / "index.html").read_text()
    assert "<style" not in page
    assert not re.search(r"\s(style|on\w+)=", page)
    assert all("src=" in script for script in re.findall(r"<script[^>]*>", page))


def test_modules_import_modules_that_are_there() -> None:
    for module in STATIC.glob("*.js"):
        for name in re.findall(r'(?:from|import)\s+"([^"]+)"', module.read_text()):
            assert name.startswith("./"), (module.name, name)
            assert (STATIC / name).is_file(), (module.name, name)


def test_one_file_asks_for_nothing_outside_of_itself() -> None:
    data = base64.b64encode(zlib.compress(json.dumps({"run": "</script>"}).encode())).decode()
    page = inline_page("a <b> & c", data)

    assert "<title>a &lt;b&gt; &amp; c</title>" in page
    addresses = re.findall(r'\s(?:src|href)="([^"]*)"', page)
    assert addresses
    assert all(address.startswith("data:") for address in addresses)
    modules = json.loads(re.search(r'<script type="importmap">(.*?)</script>', page, re.DOTALL)[1])["imports"]  # type: ignore[index]
    for name, address in modules.items():
        code = base64.b64decode(address.partition(",")[2]).decode()
        imported = re.findall(r'(?:from|import)\s+"([^"]+)"', code)
        assert set(imported) <= modules.keys(), name
    assert "rollgrad/app.js" in modules
    assert 'import "rollgrad/app.js"' in page
    kept = re.search(r'<script type="text/plain" id="data">(.*?)</script>', page)
    assert kept is not None
    assert json.loads(zlib.decompress(base64.b64decode(kept[1]))) == {"run": "</script>"}
