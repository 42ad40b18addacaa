"""Memory and time of passes, measured without computing them, for the plan of a run."""
