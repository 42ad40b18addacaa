"""The commands of `rollgrad`: their flags, help and suggestions."""
