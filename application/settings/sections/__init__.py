"""The sections of runs, one file each: enums and fields with their texts and ranges."""
