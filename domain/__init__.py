"""Pure rules of reinforcement learning for language models: values and functions, no I/O, no clock, no global state.

Shape suffixes used everywhere: ``N`` flat tokens of a packed batch, ``S`` sequences, ``G`` groups (prompts),
``T`` tokens of one sequence, ``V`` vocabulary, ``H`` hidden size.
"""
