"""The HTTP API of a front-end in a cluster with several logs."""
