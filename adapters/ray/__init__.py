"""Ray: engines and trainers in processes of their own, on one machine or many."""
