"""dependency_injector without its integrations, which no container here uses: it imports web frameworks and pydantic's
settings where they are installed, which takes half a second of each start.

A program that uses the integrations itself has them if it imports its framework before it trains.
"""

import sys

INTEGRATIONS = ("fastapi.params", "starlette.requests", "werkzeug.local", "pydantic_settings")
"""Modules that dependency_injector imports if they can be imported."""

_hidden = [name for name in INTEGRATIONS if name not in sys.modules]
sys.modules.update(dict.fromkeys(_hidden))  # type: ignore[arg-type]  # None: importing it raises ImportError
try:
    from dependency_injector import containers as containers
    from dependency_injector import providers as providers
finally:
    for _name in _hidden:
        del sys.modules[_name]
