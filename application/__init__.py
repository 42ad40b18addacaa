"""Use cases: they play episodes, collect groups, learn and run through ports, and import no technology."""
