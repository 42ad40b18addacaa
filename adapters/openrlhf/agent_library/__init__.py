"""The names of OpenRLHF-Agent over this project's agents: tools, environments, templates, engines, sessions.

Everything is synchronous, as its users' files are; what must be awaited runs in the event loop of `bridge`.
"""
