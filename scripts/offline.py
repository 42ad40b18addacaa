"""Gathers the wheels that a machine without a network lacks, into one folder.

    python3 -m pip list --format=freeze > there.txt                                   # on that machine
    python scripts/offline.py wheels --there there.txt --python 3.12 ".[deepspeed,ray]"    # here, with a network
    python3 -m pip install --no-index --no-deps wheels/*.whl                          # on that machine

What that machine has stays as it is: versions of the rest are chosen to fit it, and where none do, uv says which
requirement stands against which. A requirement is what pip takes, a folder too. What has no wheel is built here, which
only what is Python throughout may be. `--lean` leaves out of Ray's wheel what rollgrad does not use: its Java, the page
of its dashboard, and its libraries for serving, tuning and reinforcement learning.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

UNUSED = tuple(f"ray/{name}/" for name in ("jars", "dashboard/client", "rllib", "serve", "llm", "tune", "cpp"))
"""Folders of Ray's wheel that rollgrad does not use: nearly half of its bytes."""

OLDEST_GLIBC = 5
"""Minor version of the oldest glibc that wheels are built for."""


def resolve(requirements: list[str], there: list[str], python: str, glibc: int) -> list[str]:
    """Returns the lines `name==version`, or `name @ folder`, that the requirements need beside what is there."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(there))
        constraints.flush()
        platform = ["--python-version", python, "--python-platform", f"x86_64-manylinux_2_{glibc}"]
        words = ["pip", "compile", "-q", "-", "--no-header", "--no-annotate", *platform, "-c", constraints.name]
        asked = "\n".join(f"{Path(r).resolve()}" if r.startswith(".") else r for r in requirements)
        found = subprocess.run([sys.executable, "-m", "uv", *words], input=asked, stdout=subprocess.PIPE, text=True)
    if found.returncode:
        sys.exit(found.returncode)
    have = {name(line) for line in there}
    return [line for line in found.stdout.splitlines() if name(line) not in have]


def name(line: str) -> str:
    """Returns the name of the package in a line of requirements, as indices spell it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[ =@\[;]", line)[0]).lower()


def fetch(line: str, folder: Path, python: str, glibc: int) -> None:
    """Downloads the wheel of a resolved requirement into the folder, or builds it."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(glibc, OLDEST_GLIBC - 1, -1)]
    tags += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    platforms = [word for tag in tags for word in ("--platform", tag)]
    target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    got = [*pip, "download", "-qq", "--no-deps", *target, "-d", str(folder), line]
    if not Path(line).is_dir() and subprocess.run(got, capture_output=True).returncode == 0:
        return
    with tempfile.TemporaryDirectory() as built:
        subprocess.run([*pip, "wheel", "-qq", "--no-deps", "-w", built, line], check=True)
        wheel = next(Path(built).glob("*.whl"))
        if not wheel.name.endswith("none-any.whl"):
            sys.exit(f"{line} has no wheel for Python {python} on glibc 2.{glibc}, and cannot be built for it here.")
        (folder / wheel.name).write_bytes(wheel.read_bytes())


def without(wheel: Path, unused: tuple[str, ...]) -> None:
    """Writes a wheel anew without the folders, in the form of zip files that is smallest."""
    whole = wheel.rename(wheel.with_suffix(".whole"))
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(wheel, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if not line.startswith(unused)).encode()
            if not entry.filename.startswith(unused):
                new.writestr(entry, content, zipfile.ZIP_LZMA)
    whole.unlink()


def main() -> None:
    """Gathers the wheels, and says what they weigh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("requirements", nargs="+")
    parser.add_argument("--there", type=Path, required=True, help="what `pip list --format=freeze` prints there")
    parser.add_argument("--python", default="3.12", help="its version there")
    parser.add_argument("--glibc", type=int, default=31, help="its minor version there, which `ldd --version` says")
    parser.add_argument("--lean", action="store_true", help="leave out what rollgrad does not use of Ray")
    given = parser.parse_args()
    # An index knows no local versions, such as the +cu130 of a build of torch.
    there = [line.partition("+")[0] for line in given.there.read_text().splitlines() if "==" in line]
    given.folder.mkdir(parents=True, exist_ok=True)
    for line in resolve(given.requirements, there, given.python, given.glibc):
        fetch(line, given.folder, given.python, given.glibc)
    if given.lean:
        for wheel in given.folder.glob("ray-*.whl"):
            without(wheel, UNUSED)
    wheels = sorted(given.folder.glob("*.whl"), key=lambda wheel: wheel.stat().st_size)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:8.2f} MiB  {wheel.name}")
    print(f"{sum(wheel.stat().st_size for wheel in wheels) / 2**20:8.2f} MiB in {len(wheels)} wheels")


if __name__ == "__main__":
    main()
