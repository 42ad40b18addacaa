"""Reading of runs for people: rows of all rollouts, filtered and sorted; single rollouts; notes. Needs no torch."""
