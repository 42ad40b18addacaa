"""How one episode is played: one turn, several turns, or an agent that is a client."""
