"""Tools that agents call: Python functions, a code runner, thinking and the final answer."""
