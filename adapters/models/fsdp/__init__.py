"""Models divided over the processes of a group by torch's FSDP2."""
