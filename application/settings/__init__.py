"""Settings of a run, their ranges, the rules across them, presets, and the plan of memory and time."""
