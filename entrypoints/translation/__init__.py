"""What translations of other tools' command lines have in common: words into flags, and flags into settings."""
