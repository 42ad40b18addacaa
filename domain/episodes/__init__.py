"""Values of an episode: messages, prompts, generations, rewards, the trajectory."""
