"""Settings of a run, their ranges, the rules across them, and presets."""
