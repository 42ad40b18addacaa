"""The composition root: which class stands behind each port for a given configuration."""
