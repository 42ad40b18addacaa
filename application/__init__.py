"""Use cases: they orchestrate ports and know no technology."""
