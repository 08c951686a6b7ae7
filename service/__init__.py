"""The HTTP service and the `nearsense` command."""
