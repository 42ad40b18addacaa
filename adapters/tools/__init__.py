"""Tools that agents call: Python functions, MCP servers, a code runner, thinking and the final answer."""
