"""The container of reinforcement learning, and the choices it makes."""
