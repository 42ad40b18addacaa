"""The command line, the library face, and the one composition root."""
