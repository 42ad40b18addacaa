"""Wheels that `scripts/offline.py` gathers for a machine without a network."""

import subprocess
import sys
import zipfile
from pathlib import Path

from scripts.offline import name, without

FILES = {
    "tool/__init__.py": "WORD = 'kept'\n",
    "tool/jars/tool.jar": "Java " * 1000,
    "tool-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n",
    "tool-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}
RECORD = "tool-1.0.dist-info/RECORD"


def test_a_wheel_without_some_folders_is_one_that_pip_installs(tmp_path: Path) -> None:
    wheel = tmp_path / "tool-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in FILES.items():
            archive.writestr(path, text)
        archive.writestr(RECORD, "".join(f"{path},,\n" for path in [*FILES, RECORD]))
    without(wheel, ("tool/jars/",))
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == {*FILES, RECORD} - {"tool/jars/tool.jar"}
        assert "jars" not in archive.read(RECORD).decode()
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target"]
    subprocess.run([*command, str(tmp_path / "site"), str(wheel)], check=True, timeout=120)
    assert (tmp_path / "site/tool/__init__.py").read_text() == FILES["tool/__init__.py"]


def test_packages_go_by_one_name() -> None:
    lines = ("Typing_Extensions==4.1", "typing.extensions @ file:///x", "typing-extensions")
    assert {name(line) for line in lines} == {"typing-extensions"}
