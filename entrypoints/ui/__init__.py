"""The page of runs: `rollgrad ui` serves it, and a run's report is the same page in one file."""
