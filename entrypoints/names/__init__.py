"""Names of settings and commands that other tools use, or that are misspelt, and what to say about them."""
