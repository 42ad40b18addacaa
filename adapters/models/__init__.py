"""Models that are trained or scored: in this process, divided by ZeRO, or in the processes of a group."""
