"""The protocols that everything outside implements, one small module each."""
