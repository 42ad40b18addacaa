"""Plays agents: the transcript, the record of tokens, and the loop that both training and serving use."""
