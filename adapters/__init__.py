"""Technology: each folder implements ports with one library and imports it lazily."""
