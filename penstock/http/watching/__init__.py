"""How the queues stand and stood: the mirror of the first process, what is told from it, what is counted."""
