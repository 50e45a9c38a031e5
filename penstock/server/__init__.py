"""The broker as a process: its settings, its listeners and connections, and its life from start to drain."""
