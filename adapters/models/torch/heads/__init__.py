"""Readers of the last hidden states by a vocabulary's head: log-probs, entropy, divergence from a teacher."""
