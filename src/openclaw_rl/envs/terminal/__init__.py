"""The environment `terminal`: tasks that are solved with commands in a shell."""
