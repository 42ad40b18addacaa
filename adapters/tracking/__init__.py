"""Where metrics of a run go, and the report made of them."""
