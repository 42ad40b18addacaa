"""Playing one episode: one turn, several turns, or an agent that is a client."""
