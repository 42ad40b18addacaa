"""The page of `rollgrad ui` as one file: its modules, style and data inside, so that it opens by double click.

Invariant: the file asks for nothing outside of itself. Does not own: the data (`report`).
"""

import base64
import re
from functools import cache
from html import escape
from pathlib import Path

STATIC = Path(__file__).with_name("static")
"""The page's files, as the server sends them."""

_POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"
_IMPORT = re.compile(r'(\bfrom|\bimport)\s+"\./([\w./-]+\.js)"')
_SCRIPT = re.compile(r'<script src="([^"]+)" defer></script>')
_MODULE = re.compile(r'<script type="module" src="([^"]+)"></script>')
_STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)">')
_ICON = re.compile(r'(<link rel="icon" href=")([^"]+)(">)')
_TITLE = re.compile(r"<title>.*?</title>")


def inline_page(title: str, data: str) -> str:
    """Returns the whole page as HTML.

    Args:
        title: shown by the browser until the page has read its data.
        data: base64 of the deflated JSON that stands for a server's answers (`source.js` reads it).
    """
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    head = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n{_import_map()}\n'
    page = _TITLE.sub(lambda _: f"{head}<title>{escape(title)}</title>", page)
    page = _STYLE.sub(lambda found: f"<style>\n{_text(found[1])}</style>", page)
    page = _SCRIPT.sub(lambda found: f"<script>\n{_inside_script(_text(found[1]))}</script>", page)
    page = _MODULE.sub(lambda found: f'<script type="module">import "{_name(found[1])}";</script>', page)
    page = _ICON.sub(lambda found: f"{found[1]}{_url('image/svg+xml', _text(found[2]))}{found[3]}", page)
    return page.replace("</body>", f'<script type="text/plain" id="data">{data}</script>\n</body>')


@cache
def _import_map() -> str:
    """Returns the import map of all modules. A `data:` URL is no place that a relative import could start from, so the
    modules import each other by name."""
    modules = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.js") if ".iife." not in path.name)
    entries = ",\n".join(f'"{_name(name)}": "{_url("text/javascript", _renamed(name))}"' for name in modules)
    return f'<script type="importmap">{{"imports": {{\n{entries}\n}}}}</script>'


def _renamed(module: str) -> str:
    folder = module.rpartition("/")[0]
    prefix = folder + "/" if folder else ""
    return _IMPORT.sub(lambda found: f'{found[1]} "{_name(prefix + found[2])}"', _text(module))


def _name(module: str) -> str:
    return f"rollgrad/{module}"


def _url(kind: str, text: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _inside_script(code: str) -> str:
    return code.replace("</script", "<\\/script")
