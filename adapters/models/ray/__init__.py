"""Models in the processes of a Ray group."""
