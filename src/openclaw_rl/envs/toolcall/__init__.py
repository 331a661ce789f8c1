"""The environment `toolcall`: tasks that are solved by calling tools."""
