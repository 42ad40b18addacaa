"""The names of OpenRLHF-Agent over this project's agents: tools, environments, templates, engines, sessions.

Everything is synchronous, like its users' files; coroutines run in the event loop of `bridge`.
"""
